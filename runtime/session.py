"""Load and run a model in any runtime: `load` chooses it by the file, or by the name that is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import UsageError
from ..core.limits import check_threads
from ..core.storage.files import is_file
from ..core.storage.publishing import check_unchanged
from ..core.storage.reading import check_plain
from ..core.storage.wrong_file import refuse_wrong_file
from ..core.tensors import TensorSpec
from ..onnx_graph.onnx_file import OnnxFile
from .backends import registry
from .backends.backend import AUTO, Place
from .backends.session import Arrays, Session, check_inputs, place

if TYPE_CHECKING:
    from ..core.documents.sidecar import Sidecar

__all__ = ["Arrays", "Session", "TensorSpec", "check_inputs", "load", "place"]


def load(
    path: str | Path | OnnxFile,
    provider: str = "auto",
    threads: int | None = None,
    *,
    verify: bool = True,
    plugin: str | Path = "auto",
    runtime: str = AUTO,
) -> Session:
    """Open an exported model.

    Args:
        path: the model file, or an ONNX file that was already read; its suffix chooses the backend.
        provider: where to run it; "auto" takes the best that really starts (see `Session.provider`),
            any other name is used or refused.
        threads: CPU threads for one operator, from 1 to `core.limits.most_threads()`; None leaves it to the engine.
        verify: refuse a file that is not the one its sidecar was written for.
        plugin: library of compiled kernels: "auto" takes one that may be loaded by itself, from the installed package
            or the user's own cache (for the CPU the newest of this release, if it loads; for an engine the one with
            the SHA-256 it was built with); "none" takes none; the path of a library takes that one or fails.
        runtime: what runs an ONNX file: "auto" is onnxruntime; "openvino" computes in fp32, "openvino:bf16" and
            "openvino:fp16" in these. `provider` is then one of OpenVINO's devices: auto, cpu, gpu or npu.

    Raises:
        UsageError: no such file, a suffix no backend runs, a broken model, an unknown provider or runtime.
        CheckFailed: the file or its external data was altered after its sidecar was written.
        MissingDependency: the engine is not installed, or the provider asked for does not start.

    Examples:
        >>> session = localattn.load("model.onnx")
        >>> session.run({"tokens": tokens.numpy()})["logits"].shape
        (1, 64, 256)
    """
    check_threads(threads)
    file = find_model(path)
    if verify:
        check_file(file)
    backend, precision = registry.choose(file, runtime)
    return backend.open(file, Place(provider, threads, str(plugin), precision))


def find_model(path: str | Path | OnnxFile) -> Path | OnnxFile:
    """Return what `load` opens: an ONNX file, read for all that a command asks of it, or the path of an engine.

    Raises:
        UsageError: no such file, or a suffix no backend runs.
    """
    if isinstance(path, OnnxFile):
        return path
    path = Path(path)
    backend, _ = registry.choose(path)
    if backend.built:  # of an ONNX file `OnnxFile.read` looks at the bytes that it reads
        refuse_wrong_file(path)
    check_plain(path)
    if not is_file(path):
        why = "There is no such file."
        raise UsageError(f"Cannot run {path}.", why=why, fix="Give the path of an exported model.")
    return backend.read(path)


def read_model_sidecar(path: Path) -> Sidecar | None:
    """Read the sidecar of the exported model behind a file: an ONNX file, or one that was built from it.

    Raises:
        UsageError: a sidecar that is broken, or missing where the file cannot do without; a suffix no backend runs.
    """
    from ..core.documents.engine_sidecar import EngineSidecar

    sidecar = registry.choose(path)[0].sidecar(path)
    return sidecar.model if isinstance(sidecar, EngineSidecar) else sidecar


def check_file(file: Path | OnnxFile) -> None:
    """Refuse a file that is not the one its sidecar was written for.

    Raises:
        CheckFailed: the SHA-256 of the file or of its external data differs.
    """
    if isinstance(file, OnnxFile):
        file.check_unchanged()
    else:
        check_unchanged(file)
