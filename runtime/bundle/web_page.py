"""Write a web page on which a step file generates text, for any static web server; check the model first.

The page's own files are in the folder `web` next to this module; onnxruntime-web comes from a folder of the user.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.spelling import spelled
from ...core.storage.files import is_file
from ...core.storage.publishing import MAX_BYTES
from ...core.storage.reading import read_plain
from ..backends.step_file import data_inputs, other_tensors, step_record
from ..generation.defaults import TOKENIZER_CONFIG
from ..generation.tokenizer import TOKENIZER
from .parts import ModelPart
from .place import BundleFiles
from .web_text import FILES as TEXT_FILES
from .web_text import HOME as TEXT
from .web_text import page_text

# The folder of the page, and that of the ONNX files which it loads.
HOME = "web"
MODELS = f"{HOME}/model"
PAGE_FILES = Path(__file__).with_name("web")
# Files in the folder `dist` of onnxruntime-web's package: the build without WebGPU, and the WebAssembly it loads.
RUNTIME_FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
_INSTALL = "npm install --ignore-scripts onnxruntime-web puts it into node_modules/onnxruntime-web."


def read_web_version(folder: Path) -> str:
    """Return the version of onnxruntime-web in the folder of its npm package.

    Raises:
        UsageError: it is another folder, or lacks a file that the page needs.
    """
    try:
        package = json.loads(read_plain(folder / "package.json", MAX_BYTES))
        name, version = package["name"], str(package["version"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = "It has no readable package.json."
        raise UsageError(f"{folder} is not onnxruntime-web.", why=why, fix=_INSTALL) from error
    if name != "onnxruntime-web":
        raise UsageError(f"{folder} is not onnxruntime-web.", why=f"It is {str(name)[:100]!r}.", fix=_INSTALL)
    missing = [file for file in RUNTIME_FILES if not is_file(folder / "dist" / file)]
    if missing:
        why = f"It has no dist/{missing[0]}."
        raise UsageError(f"onnxruntime-web {version} in {folder} does not fit the page.", why=why, fix=_INSTALL)
    return version


def check_web_model(model: ModelPart) -> None:
    """Refuse a model that the page cannot run.

    Raises:
        UsageError: it is not a step file of one sequence of tokens, or it is bf16.
    """
    path = model.path
    if model.sidecar is None:
        why = f"Its sidecar {path.name}.json, which describes its caches, is missing in its folder: copy it too."
        raise UsageError(f"{path} cannot go on a web page.", why=why)
    record = step_record(model.sidecar, path.name)
    if record.mode != "step":
        why = f"It needs {record.chunk} positions at once, and is bundled with its step file."
        raise UsageError(f"{path} is a {record.mode} file.", why=why, fix="Give the step file.")
    data = data_inputs(model, record)
    if len(data) != 1 or data[0].dtype != "int64" or len(data[0].shape) != 2:
        listed = ", ".join(spec.describe() for spec in data)
        raise UsageError(
            f"{path} cannot go on a web page.", why=f"The page needs token inputs, but the file has {listed}."
        )
    if data[0].shape[0] != 1:
        why = f"It continues {data[0].shape[0]} sequences at once, but the page shows one."
        raise UsageError(f"{path} cannot go on a web page.", why=why, fix=f"Export it with {argument('batch', 1)}.")
    if model.dtype == "bf16":
        why = "onnxruntime-web has no bf16 kernels on the CPU."
        raise UsageError(
            f"{path} cannot go on a web page.", why=why, fix=f"Export it with {argument('dtype', 'fp32')} or fp16."
        )


def write_page(files: BundleFiles, runtime: Path, version: str, models: Sequence[ModelPart]) -> None:
    """Write the page's files, the runtime, and `page.json`: what the page loads and keeps, and its digest.

    Args:
        files: the bundle, with its ONNX files in the folder `MODELS`.
        runtime: the folder of onnxruntime-web's npm package.
        version: of it.
        models: the step file, and the file that takes prompts in chunks if there is one.

    Raises:
        UsageError: the page's libraries do not read the tokenizer or the chat template in the model's folder.
    """
    paths, text = [], page_text(models[0].path.parent)
    if text is not None:
        for source in sorted(TEXT_FILES.iterdir()):
            files.take(source, f"{HOME}/{TEXT}/{source.name}", "web")
            paths.append(f"{TEXT}/{source.name}")
    for source in sorted(PAGE_FILES.iterdir()):
        files.take(source, f"{HOME}/{source.name}", "web")
        paths.append(source.name)
    for name in RUNTIME_FILES:
        files.take(runtime / "dist" / name, f"{HOME}/onnxruntime-web/{name}", "runtime")
        paths.append(f"onnxruntime-web/{name}")
    names = sorted({path.name for model in models for path in model.files})
    if text is not None:
        names += [name for name in (TOKENIZER, TOKENIZER_CONFIG) if (models[0].path.parent / name).is_file()]
    written = [f"{HOME}/{path}" for path in paths] + [f"{MODELS}/{name}" for name in names]
    digests = {path: files.digest(path) for path in written}  # so that a browser's copy belongs to one bundle only
    paths += sorted(map(_address, names))
    step, *prefill = (_address(model.path.name) for model in models)
    assert models[0].step is not None
    _, logits = other_tensors(models[0], models[0].step)
    page = {
        "name": spelled(models[0].path.stem),
        "vocabulary": int(logits.shape[-1]),
        "step": step,
        "prefill": prefill[0] if prefill else None,
        "text": text,
        "onnxruntime_web": version,
        "digest": hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest(),
        "files": paths,
    }
    files.add(f"{HOME}/page.json", (json.dumps(page, indent=1) + "\n").encode(), "web")


def _address(name: str) -> str:
    """Return the address of a file of the model, relative to the page."""
    # Encoded as in the page's script, so that the copy kept for offline use is found under it.
    return "model/" + quote(name, safe="!*'()")
