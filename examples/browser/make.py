"""Make a page on which the shipped model writes Python as you type, in your browser.

    python examples/browser/make.py                                     needs npm, and a network for onnxruntime-web
    python -m http.server --directory localattn-browser/bundle/web      then open http://localhost:8000

It does what `localattn export --mode step` and `localattn bundle --web` do, as for a model of your own.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from urllib.parse import quote

from localattn.demo import checkpoint_path, config_path
from localattn.exporter.export import ExportRequest, export
from localattn.runtime.bundle.create import BundleRequest, create_bundle

ONNXRUNTIME_WEB = "onnxruntime-web@1.30.0"
TEXT = 'import os\nfrom pathlib import Path\n\n\ndef read_lines(path):\n    """Return the lines of a text file.'


def make(folder: Path, onnxruntime_web: Path | None = None) -> Path:
    """Write the demo's step file and the bundle with its page into `folder`; returns the bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    if onnxruntime_web is None:
        npm = ["npm", "install", "--ignore-scripts", "--prefix", str(folder), ONNXRUNTIME_WEB]
        subprocess.run(npm, check=True)
        onnxruntime_web = folder / "node_modules" / "onnxruntime-web"
    # localattn export pybytes_w64.safetensors --mode step -o pybytes_step.onnx
    model = folder / "pybytes_step.onnx"
    export(ExportRequest(checkpoint_path(), model, config=config_path(), mode="step", overwrite=True))
    # localattn bundle pybytes_step.onnx -o bundle --web
    request = BundleRequest(model, folder / "bundle", onnxruntime_web=onnxruntime_web, overwrite=True)
    return create_bundle(request).path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("localattn-browser"), help="folder for everything")
    parser.add_argument("--onnxruntime-web", type=Path, help="npm's package, if it is here already")
    options = parser.parse_args()
    bundle = make(options.output, options.onnxruntime_web)
    print(f"\nServe it:  python3 -m http.server --directory {bundle / 'web'}")
    print(f"Open it:   http://localhost:8000/#text={quote(TEXT)}&temperature=0.5&seed=10")


if __name__ == "__main__":
    main()
