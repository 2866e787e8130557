"""`parity` without a checkpoint: compare an exported file or engine with another exported file on the same inputs.

For devices that have neither PyTorch nor the checkpoint: the reference is an ONNX file, run by onnxruntime on the CPU
from its ONNX functions. That proves two files equal. Whether the reference itself is right was checked when it was
exported; its sidecar has the result, as long as it belongs to the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...core.documents.engine_sidecar import EngineSidecar
from ...core.documents.proof import proven_by_golden
from ...core.documents.sidecar import PARITY, CheckRecord, Sidecar
from ...core.error_texts import argument
from ...core.errors import CheckFailed, LocalAttnError, MissingDependency, UsageError
from ...core.progress import timed_steps
from ...core.tolerance import Baseline, coarsest
from ...onnx_graph.windows import windows_of_sidecar
from ..backends import registry
from .compare import compare_models, new_report, range_of, take_golden, worst_of
from .comparison import largest_error, outcome_of, unproven_outputs
from .golden import Golden
from .report import ParityReport, ParityRequest, Reference, altered
from .runner import FileRunner, open_runner

_log = logging.getLogger(__name__)
# Every measured baseline was smaller: beyond this the cosine would be below the table's.
_MOST_RELATIVE = 0.1


@timed_steps(_log)
def run_file_parity(request: ParityRequest, progress: Callable[[str], None] = lambda _: None) -> ParityReport:
    """Compare two files on the same inputs.

    Raises:
        UsageError: a file that cannot be read, two that do not take the same inputs, options of a checkpoint.
        CheckFailed: an output is missing or has another shape than the reference's, or a sidecar was changed.
        MissingDependency: an engine library, or the provider asked for, is not there.
    """
    if request.config is not None or request.causal is not None:
        raise UsageError(
            f"{argument('config')} and {argument('causal')} apply to checkpoints only.",
            why=f"{request.against} is an exported file, which needs no configuration.",
            fix="Leave the two out, or compare with the checkpoint.",
        )
    progress(f"Loading {request.model.name}")
    candidate = open_runner(
        request.model, request.provider, request.plugin, runtime=request.runtime, rounds=request.rounds
    )
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
        *(f"{reference.name}: {line}" for line in reference.notes),
    ]
    described = Reference("file", reference.precision, reference.backend, reference.provider, checked)
    windows = windows_of_sidecar(candidate.sidecar) or windows_of_sidecar(reference.sidecar)
    unproven = [] if was_proven(candidate) or was_proven(reference) else _unproven_arguments(candidate, reference)
    baseline = _recorded_baseline(coarsest([candidate.precision, reference.precision]), candidate, reference)
    return compare_models(request, candidate, reference, described, windows, notes, progress, baseline, unproven)


def _recorded_baseline(precision: str, *runners: FileRunner) -> Baseline | str:
    """Return the unmodified module's error, as measured at the export of one of these files, or why it is unknown."""
    for runner in runners:
        checks = [] if runner.sidecar is None else runner.sidecar.checks
        found = next((check.baseline for check in checks if check.baseline is not None), None)
        if found is None or found.dtype != precision or altered(runner.file):
            continue
        if 0 <= found.relative_rms <= _MOST_RELATIVE:
            return replace(found, source=f"{found.source}, as the sidecar of {runner.path.name} recorded it")
    return f"no sidecar records the untouched module's own error in {precision}"


def _unproven_arguments(*runners: FileRunner) -> list[str]:
    """List the arguments that the weights of these models do not determine, as their exports recorded."""
    return list(dict.fromkeys(name for x in runners if x.sidecar is not None for name in x.sidecar.unproven))


def run_golden_parity(request: ParityRequest, progress: Callable[[str], None] = lambda _: None) -> ParityReport:
    """Compare a file only with golden outputs, without a checkpoint or another file.

    Raises:
        UsageError: a file that cannot be read, golden outputs that do not fit it, options of other references.
        CheckFailed: an output has another shape than the golden one, or a sidecar was changed.
        MissingDependency: an engine library, or the provider asked for, is not there.
    """
    options = {"config": request.config, "causal": request.causal, "inputs": request.inputs, "seq_len": request.lengths}
    for name, value in options.items():
        if value is not None and value != ():
            raise UsageError(
                f"{argument(name)} does not apply if only golden outputs are compared.",
                why="Golden outputs come with their inputs, and no checkpoint is read.",
                fix=f"Leave it out, or also give a reference: {argument('against')}.",
            )
    progress(f"Loading {request.model.name}")
    candidate = open_runner(
        request.model, request.provider, request.plugin, runtime=request.runtime, rounds=request.rounds
    )
    golden = Golden.read(request.against)
    report = new_report(
        request,
        candidate,
        Reference("golden", golden.precision),
        windows_of_sidecar(candidate.sidecar),
        [*altered(candidate.file), *candidate.notes],
        _unproven_arguments(candidate),
    )
    take_golden(golden, request, candidate, report, progress, _recorded_baseline(report.dtype, candidate))
    report.tolerance = report.golden_tolerance or report.tolerance
    report.range = range_of(request, candidate, "the recorded inputs")
    return report


def check_built_engine(engine: Path, model: Path, library: Path | None = None, provider: str = "auto") -> CheckRecord:
    """Run a newly built engine and its ONNX file on the same inputs, one set at each size, and compare.

    The file is run by onnxruntime on the CPU, from its functions.

    Args:
        engine: the engine, with its sidecar in the same folder.
        model: the ONNX file.
        library: the plugin library that the engine was built with.
        provider: where the engine runs, "cuda:1" for GPU 1.

    Returns:
        A record, failed where an output is out of tolerance; skipped where one of the two cannot be run here.
    """
    plugin = "auto" if library is None else str(library)
    try:
        report = run_file_parity(ParityRequest(engine, model, seeds=(0,), plugin=plugin, provider=provider))
    except LocalAttnError as error:
        why = " ".join(filter(None, (error.what, error.why)))
        if isinstance(error, CheckFailed):
            return CheckRecord(name=PARITY, status="failed", detail=why)
        return CheckRecord(
            name=PARITY, status="skipped", detail=f"{model.name} and the engine could not be compared: {why}"
        )
    where, worst = worst_of(report.comparisons, report.tolerance)
    detail = (
        f"{largest_error([comparison for _, comparison in report.comparisons])} against {model.name} in "
        f"{report.reference.backend} on the CPU ({report.tolerance.describe()}), worst at {where}"
    )
    nothing, why = unproven_outputs(report.overall().values(), report.tolerance)
    detail += f"; {why}" if report.passed and why else ""
    status = outcome_of(report.passed, nothing)
    return CheckRecord(name=PARITY, status=status, detail=detail, figures=worst.figures())


def was_proven(runner: FileRunner) -> bool:
    """Return whether the file is the one whose export compared it with golden outputs."""
    return runner.sidecar is not None and proven_by_golden(runner.sidecar.checks) and not altered(runner.file)


def _open_reference(request: ParityRequest) -> FileRunner:
    """Open the other file on the CPU without compiled kernels, so that the result rests on onnxruntime alone.

    An engine uses the plugin library that was named for the first one, if it needs any.

    Raises:
        UsageError: it cannot be run this way.
    """
    path = request.against
    sidecar = registry.choose(path)[0].sidecar(path)
    if isinstance(sidecar, EngineSidecar):
        candidate = registry.of_file(request.model)
        needs_library = sidecar.plugin is not None and sidecar.plugin.kind == "library"
        both = candidate is not None and candidate.built and needs_library
        return open_runner(path, plugin=request.plugin if both else "auto")
    try:
        return open_runner(path, "cpu", "none", prefill=False)
    except MissingDependency as error:
        if sidecar is None or sidecar.function_body:
            raise
        raise UsageError(
            f"{path} cannot be the reference.",
            why="It was exported without the attention node's ONNX function, which a reference needs.",
            fix="Give the same model exported with the ONNX function.",
        ) from error


def _record(reference: FileRunner) -> tuple[str | None, list[str]]:
    """Return the result of the reference's own export check, or a note why none is known."""
    name, sidecar = reference.path.name, reference.engine or reference.sidecar
    making, made = ("export", "exported") if reference.engine is None else ("build", "built")
    found = None if sidecar is None else next((check for check in sidecar.checks if check.name == PARITY), None)
    if sidecar is None:
        doubt = "it has no sidecar"
    elif found is None:
        doubt = "its sidecar has no record of a comparison with a reference"
    elif found.status != "passed":
        doubt = f"the comparison at its {making} is recorded as {found.status}: {found.detail}"
    elif isinstance(sidecar, Sidecar) and not sidecar.model_sha256:
        doubt = "its sidecar does not record for which file it was written"
    else:
        doubt = "; ".join(altered(reference.file))
    if doubt or found is None:
        return None, [f"{name} itself is not proven right: {doubt}"]
    return f"{name} was checked when it was {made}: {found.detail}", []


def _origin(candidate: FileRunner, reference: FileRunner) -> list[str]:
    """Note if the two files are the same, or are made from different files or checkpoints."""
    notes, name = [], candidate.path.name
    if candidate.engine is not None and candidate.onnx_sha256 != reference.onnx_sha256:
        other = reference.path.name
        if reference.engine is not None:
            other = f"{reference.engine.onnx_name} of {other}"
        notes.append(f"{name} was built from {candidate.engine.onnx_name}, which is not {other}")
    weights = [x.sidecar.checkpoint_sha256 for x in (candidate, reference) if x.sidecar is not None]
    if len(weights) == 2 and all(weights) and weights[0] != weights[1]:
        notes.append(f"{name} and {reference.path.name} were exported from different checkpoints")
    ran = [(x.backend, x.provider, x.plugin) for x in (candidate, reference)]
    if ran[0] == ran[1] and candidate.path.samefile(reference.path) and len(candidate.modes()) == 1:
        notes.append(f"{name} is compared with itself, run in the same way, which proves nothing")
    return notes
