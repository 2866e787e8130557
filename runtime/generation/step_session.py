"""Open step files in whatever runtime, with the prefill file next to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...core.error_texts import HOW_TO_EXPORT_STEPS
from ...core.errors import UsageError
from ...core.limits import check_threads
from ...core.storage.files import is_file
from ...core.storage.reading import check_plain
from ..backends import registry
from ..backends.backend import AUTO, Place
from ..backends.step_file import EXPORT_AGAIN, Prefill, prefill_path, step_record
from ..backends.step_session import StepSession
from ..session import check_file, find_model, read_model_sidecar

if TYPE_CHECKING:
    from ...core.documents.sidecar import Sidecar
    from ...onnx_graph.onnx_file import OnnxFile

__all__ = ["StepSession", "find_prefill", "open_session", "open_step"]


def open_session(
    file: Path | OnnxFile,
    sidecar: Sidecar,
    provider: str,
    threads: int | None,
    plugin: str,
    runtime: str = AUTO,
    *,
    prefill: bool = True,
) -> StepSession:
    """Open the session of a step file whose sidecar was read; errors as of `open_step`.

    Without `prefill`, no prefill file is looked for.
    """
    backend, precision = registry.choose(file, runtime)
    found = find_prefill(Path(file), sidecar) if prefill else None
    return backend.open_step(file, sidecar, found, Place(provider, threads, plugin, precision))


def open_step(
    path: str | Path,
    provider: str = "auto",
    threads: int | None = None,
    *,
    plugin: str | Path = "auto",
    runtime: str = AUTO,
) -> StepSession:
    """Open a step file at position 0; the prefill file that its sidecar names is used if it is in the same folder.

    Args:
        path: the step file or the engine built from it, the sidecar next to it.
        provider: as for `runtime.session.load`.
        threads: CPU threads for one operator, from 1 to `core.limits.most_threads()`; None leaves it to the engine.
        plugin: as for `runtime.session.load`.
        runtime: as for `runtime.session.load`.

    Raises:
        UsageError: no such file, no step file, no sidecar, files that do not belong together.
        CheckFailed: a file was altered after its sidecar was written.
        MissingDependency: the engine is not installed, or the provider asked for does not start.

    Examples:
        >>> step = localattn.open_step("step.onnx")
        >>> step.consume({"tokens": tokens[:, :10].numpy()}).shape
        (1, 1, 256)
    """
    from ...core.documents.sidecar import sidecar_path

    path = Path(path)
    check_threads(threads)
    backend = registry.of_file(path)
    if backend is None:
        known = ", ".join(registry.suffixes())
        raise UsageError(
            f"Cannot generate with {path}.", why=f"Its suffix must be one of: {known}.", fix=HOW_TO_EXPORT_STEPS
        )
    how = backend.how_to_make_steps
    check_plain(path)
    if not is_file(path):
        raise UsageError(f"Cannot generate with {path}.", why="There is no such file.", fix=how)
    file = find_model(path)
    check_file(file)
    sidecar = read_model_sidecar(path)
    if sidecar is None:
        why = backend.steps_without_sidecar.format(sidecar_path(path).name)
        raise UsageError(f"Cannot generate with {path}.", why=why, fix=how)
    record = step_record(sidecar, path.name, how)
    if record.mode != "step":
        raise UsageError(
            f"{path} is a {record.mode} file.",
            why=f"It needs {record.chunk} positions at once, and is opened by its step file.",
            fix="Give the step file.",
        )
    return open_session(file, sidecar, provider, threads, str(plugin), runtime)


def find_prefill(path: Path, sidecar: Sidecar) -> Prefill | None:
    """Find the prefill file of a step file, or of its engine, and its sidecar's entries; None if it is missing.

    Args:
        path: the step file, or the engine built from it.
        sidecar: of the step file.

    Raises:
        UsageError: it belongs to another model.
        CheckFailed: it was changed after its sidecar was written.
    """
    record = step_record(sidecar)
    prefill = prefill_path(path, record)
    other = read_model_sidecar(prefill) if prefill is not None and is_file(prefill) else None
    if prefill is None or other is None:
        return None
    file = find_model(prefill)
    check_file(file)
    chunk = step_record(other, prefill.name)
    if other.checkpoint_sha256 != sidecar.checkpoint_sha256 or chunk.caches != record.caches:
        raise UsageError(
            f"{prefill.name} does not belong to {path.name}.",
            why="The two files come from different checkpoints, or their caches differ.",
            fix=EXPORT_AGAIN,
        )
    return file, chunk
