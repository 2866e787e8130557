"""The demo model as TensorRT engines: with the plugin and without, built, run and compared by the command line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "demo" / "pybytes_w64.safetensors"
# Python module → the backend it is; plugins to build with.
BACKENDS = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}
PLUGINS = ("library", "none")
_LONGEST_SECONDS = 1800


def build_and_compare() -> list[dict[str, Any]]:
    """One entry an engine: `status` passed, failed or skipped, `what` in words, and parity's report."""
    installed = {backend for module, backend in BACKENDS.items() if importlib.util.find_spec(module) is not None}
    if not installed:
        return [{"status": "skipped", "what": "engines: TensorRT is not installed"}]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model.onnx")
        code, output = _localattn("export", CHECKPOINT, "-o", model, "--dtype", "fp16")
        if code:
            status = "skipped" if code == 3 else "failed"
            return [{"status": status, "what": f"engines: the export ended with {code}: {output}"}]
        return [_engine(model, backend, plugin) for backend in sorted(installed) for plugin in PLUGINS]


def _engine(model: Path, backend: str, plugin: str) -> dict[str, Any]:
    """Build, run and judge one engine."""
    what = f"{backend} engine, plugin {plugin}"
    engine = model.with_name(f"{backend}-{plugin}.engine")
    code, output = _localattn("build", model, "-o", engine, "--backend", backend, "--plugin", plugin)
    if code:
        return {"status": "skipped" if code == 3 else "failed", "what": f"{what}: build ended with {code}: {output}"}
    code, output = _localattn("parity", engine, "--against", CHECKPOINT, "--format", "json")
    if code:
        return {"status": "failed", "what": f"{what}: parity ended with {code}: {output}"}
    return {"status": "passed", "what": what, "parity": json.loads(output)}


def _localattn(*arguments: object) -> tuple[int, str]:
    """Exit code, and standard output, or the end of standard error if it failed."""
    command = [sys.executable, "-m", "localattn.cli", *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_SECONDS)
    return finished.returncode, finished.stderr.strip()[-500:] if finished.returncode else finished.stdout
