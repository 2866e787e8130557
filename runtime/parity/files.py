"""`parity` without a checkpoint: an exported file or engine beside another exported file, on the same inputs.

For devices that have neither PyTorch nor the checkpoint: the reference is an ONNX file, run by onnxruntime on the CPU
from its function bodies. That proves two files equal. Whether the reference itself is right was checked when it was
exported; its sidecar has the result, as long as it belongs to the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...core.documents.engine_facts import ENGINE_SUFFIX, read_engine_facts
from ...core.errors import MissingDependency, UsageError
from ...onnx_graph.windows import windows_of_sidecar
from .compare import compare_models
from .report import ParityReport, ParityRequest, Reference, altered
from .runner import FileRunner, open_runner

if TYPE_CHECKING:
    from ...core.documents.sidecar import CheckRecord

# The check of an export that compares the written file with a reference.
_PARITY = "parity"


def run_file_parity(request: ParityRequest, progress: Callable[[str], None] = lambda _: None) -> ParityReport:
    """Run two files on the same inputs.

    Raises:
        UsageError: a file that cannot be read, two that do not take the same inputs, options of a checkpoint.
        CheckFailed: an output is missing or has another shape than the reference's, or facts were altered.
        MissingDependency: an engine library, or the provider asked for, is not there.
    """
    if request.config is not None or request.causal is not None:
        raise UsageError(
            "--config and --causal belong to a checkpoint.",
            why=f"{request.against} is an exported file, which needs no configuration.",
            fix="Leave them out, or compare with the checkpoint.",
        )
    progress(f"Loading {request.model.name}")
    candidate = open_runner(request.model, request.provider, request.plugin)
    progress(f"Loading {request.against.name}")
    reference = _open_reference(request)
    if candidate.name == reference.name:
        candidate.name, reference.name = str(candidate.path), str(reference.path)
    checked, doubts = _record(reference)
    notes = [
        *_origin(candidate, reference),
        *altered(candidate.file),
        *doubts,
        *candidate.notes,
        *(f"output {x!r} is in {candidate.name} only" for x in candidate.outputs if x not in reference.outputs),
        *(f"{reference.name}: {line}" for line in reference.notes),
    ]
    described = Reference("file", reference.precision, reference.backend, reference.provider, checked)
    windows = windows_of_sidecar(candidate.sidecar) or windows_of_sidecar(reference.sidecar)
    return compare_models(request, candidate, reference, described, windows, notes, progress)


def _open_reference(request: ParityRequest) -> FileRunner:
    """Open the other file: on the CPU and without compiled kernels, so that the result rests on onnxruntime alone.

    An engine takes the plugin library that was named for the first one, if it needs any.

    Raises:
        UsageError: it cannot be run so.
    """
    path = request.against
    if path.suffix.lower() == ENGINE_SUFFIX:
        plugin = read_engine_facts(path).plugin
        both = request.model.suffix.lower() == ENGINE_SUFFIX and plugin is not None and plugin.kind == "library"
        return open_runner(path, plugin=request.plugin if both else "auto")
    try:
        return open_runner(path, "cpu", "none", prefill=False)
    except MissingDependency as error:
        from ...core.documents.sidecar import read_sidecar

        sidecar = read_sidecar(path)
        if sidecar is None or sidecar.function_body:
            raise
        raise UsageError(
            f"{path} cannot be the reference.",
            why="It was exported without its function body, and a reference is run without compiled kernels.",
            fix="Give the same model exported with its function body.",
        ) from error


def _record(reference: FileRunner) -> tuple[str | None, list[str]]:
    """What the reference's own export found, or a note why nothing is known."""
    name, sidecar = reference.path.name, reference.sidecar
    found = next((check for check in sidecar.checks if check.name == _PARITY), None) if sidecar is not None else None
    why = _unproven(reference, found)
    if found is None or why is not None:
        return None, [f"that {name} itself is right is not proven here: {why}"]
    return f"{name} was checked when it was exported: {found.detail}", []


def _unproven(reference: FileRunner, found: CheckRecord | None) -> str | None:
    """Why the record of the reference's export proves nothing of the file; None if it does."""
    if reference.engine is not None:
        return "it is an engine, and what engines compute is not compared when they are built"
    if reference.sidecar is None:
        return "no sidecar lies beside it"
    if found is None:
        return "its sidecar has no record of a comparison with a reference"
    if found.status != "passed":
        return f"its export's comparison is called {found.status}: {found.detail}"
    if not reference.sidecar.model_sha256:
        return "its sidecar does not say for which file it was written"
    return "; ".join(altered(reference.file)) or None


def _origin(candidate: FileRunner, reference: FileRunner) -> list[str]:
    """Notes where the two are not made from one another, or from one checkpoint; or are the same."""
    notes, name = [], candidate.path.name
    if candidate.engine is not None and candidate.onnx_sha256 != reference.onnx_sha256:
        other = reference.path.name
        if reference.engine is not None:
            other = f"{reference.engine.onnx_name} of {other}"
        notes.append(f"{name} was built from {candidate.engine.onnx_name}, which is another file than {other}")
    weights = [x.sidecar.checkpoint_sha256 for x in (candidate, reference) if x.sidecar is not None]
    if len(weights) == 2 and all(weights) and weights[0] != weights[1]:
        notes.append(f"{name} and {reference.path.name} were exported from different checkpoints")
    ran = [(x.backend, x.provider, x.plugin) for x in (candidate, reference)]
    if ran[0] == ran[1] and candidate.path.samefile(reference.path) and len(candidate.modes()) == 1:
        notes.append(f"{name} is compared with itself, run in the same way: that proves nothing")
    return notes
