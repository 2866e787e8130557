"""`parity` without a checkpoint: an exported file or engine beside another exported file, on the same inputs.

For devices that have neither PyTorch nor the checkpoint: the judge is the ONNX file, run by onnxruntime on the CPU from
its function bodies. That proves two files equal. That the judge is right, its own export has found out; its sidecar
tells, as long as it belongs to the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.engine_facts import ENGINE_SUFFIX
from ..core.errors import CheckFailed, MissingDependency, UsageError
from ..core.tensors import TensorSpec
from ..core.tolerance import Tolerance, coarsest, tolerance_for
from ..core.window_view import WindowView
from ..onnx_graph.windows import windows_of_sidecar
from .compare import Comparison, compare_arrays
from .error_spread import SequenceAxis
from .parity_report import ParityReport, ParityRequest, Reference, altered, not_finite
from .parity_side import Side, open_side, steps_of
from .parity_trials import Trial, Trials
from .session import Arrays
from .shared_inputs import shared_specs

if TYPE_CHECKING:
    from ..core.sidecar import CheckRecord

# The check of an export that compares the written file with a reference.
_PARITY = "parity"


def run_file_parity(request: ParityRequest, progress: Callable[[str], None] = lambda _: None) -> ParityReport:
    """Run two files on the same inputs.

    Raises:
        UsageError: a file that cannot be read, two that do not take the same inputs, options of a checkpoint.
        CheckFailed: an output is missing or has another shape than the judge's, or facts were altered.
        MissingDependency: an engine library, or the provider asked for, is not there.
    """
    if request.config is not None or request.causal is not None:
        raise UsageError(
            "--config and --causal belong to a checkpoint.",
            why=f"{request.against} is an exported file, which needs no configuration.",
            fix="Leave them out, or compare with the checkpoint.",
        )
    progress(f"Loading {request.model.name}")
    model = open_side(request.model, request.provider, request.plugin)
    progress(f"Loading {request.against.name}")
    judge = _open_judge(request.against)
    names = _names(model.path, judge.path)
    specs = shared_specs(model.inputs, judge.inputs, names)
    precision = coarsest([model.precision, judge.precision])
    tolerance = tolerance_for(precision, request.atol, request.rtol)
    windows = windows_of_sidecar(model.sidecar) or windows_of_sidecar(judge.sidecar)
    geometries = [view.geometry for view in windows if not view.biases]
    trials = Trials(request, specs, (model, judge), geometries)
    checked, notes = _record(judge)
    report = ParityReport(
        precision,
        model.provider,
        request.model,
        request.against,
        tolerance,
        _at_length(windows, trials.length),
        model.plugin,
        model.sidecar,
        Reference("file", judge.precision, judge.backend, judge.provider, checked),
        notes=[
            *_origin(model, judge),
            *altered(model.file),
            *notes,
            *model.notes,
            *_unlike(model, judge, specs),
        ],
    )
    report.notes += [f"{names[1]}: {line}" for line in judge.notes] + trials.notes
    worst: Arrays = {}
    for trial in trials:
        report.notes += not_finite(trial.inputs)
        progress(f"Comparing: {trial.name}")
        expected = judge.run(trial.inputs)
        for way, run in model.ways():
            outputs = run(trial.inputs)
            comparisons = _compare((model, judge), trial, outputs, expected, tolerance)
            if report.take(trial.name + way, trial.inputs, outputs, comparisons):
                worst = expected
    if request.keep_reference:
        report.outputs = report.outputs | {f"{name}.reference": x for name, x in worst.items()}
    return report


def _open_judge(path: Path) -> Side:
    """The other file: on the CPU and without compiled kernels, so that nothing but onnxruntime has to be believed.

    Raises:
        UsageError: it cannot be run so.
    """
    if path.suffix.lower() == ENGINE_SUFFIX:
        return open_side(path)
    try:
        return open_side(path, "cpu", "none", companion=False)
    except MissingDependency as error:
        from ..core.sidecar import read_sidecar

        sidecar = read_sidecar(path)
        if sidecar is None or sidecar.function_body:
            raise
        raise UsageError(
            f"{path} cannot judge.",
            why="It was exported without its function body, and a judge is run without compiled kernels.",
            fix="Give the same model exported with its function body.",
        ) from error


def _names(model: Path, judge: Path) -> tuple[str, str]:
    """What the two are called: by name, or where that is the same by path."""
    return (model.name, judge.name) if model.name != judge.name else (str(model), str(judge))


def _record(judge: Side) -> tuple[str | None, list[str]]:
    """What is known of the judge itself: what its export found, or a note why nothing is."""
    name, sidecar = judge.path.name, judge.sidecar
    found = next((check for check in sidecar.checks if check.name == _PARITY), None) if sidecar is not None else None
    why = _unproven(judge, found)
    if found is None or why is not None:
        return None, [f"that {name} itself is right is not proven here: {why}"]
    return f"{name} was checked when it was exported: {found.detail}", []


def _unproven(judge: Side, found: CheckRecord | None) -> str | None:
    """Why the record of the judge's export proves nothing of the file; None if it does."""
    if judge.engine is not None:
        return "it is an engine, and what engines compute is not compared when they are built"
    if judge.sidecar is None:
        return "no sidecar lies beside it"
    if found is None:
        return "its sidecar has no record of a comparison with a reference"
    if found.status != "passed":
        return f"its export's comparison is called {found.status}: {found.detail}"
    if not judge.sidecar.model_sha256:
        return "its sidecar does not say for which file it was written"
    return "; ".join(altered(judge.file)) or None


def _origin(model: Side, judge: Side) -> list[str]:
    """Notes where the two are not made from one another, or from one checkpoint; or are the same."""
    notes = []
    if model.engine is not None and model.onnx_sha256 != judge.onnx_sha256:
        other = judge.path.name if judge.engine is None else f"{judge.engine.onnx_name} of {judge.path.name}"
        notes.append(f"{model.path.name} was built from {model.engine.onnx_name}, which is another file than {other}")
    weights = [side.sidecar.checkpoint_sha256 for side in (model, judge) if side.sidecar is not None]
    if len(weights) == 2 and all(weights) and weights[0] != weights[1]:
        notes.append(f"{model.path.name} and {judge.path.name} were exported from different checkpoints")
    alike = (model.backend, model.provider, model.plugin) == (judge.backend, judge.provider, judge.plugin)
    if alike and model.path.samefile(judge.path) and len(model.ways()) == 1:
        notes.append(f"{model.path.name} is compared with itself, run in the same way: that proves nothing")
    return notes


def _unlike(model: Side, judge: Side, specs: Sequence[TensorSpec]) -> list[str]:
    """Notes on outputs and sizes that the judge does not have."""
    notes = [f"output {name!r} is in {model.path.name} only" for name in model.outputs if name not in judge.outputs]
    if not steps_of([model]) and len(_open(specs)) < len(_open(model.inputs)):
        notes.append(f"{model.path.name} leaves sizes open, and is compared at those of {judge.path.name} only")
    return notes


def _open(specs: Sequence[TensorSpec]) -> set[str]:
    return {size for spec in specs for size in spec.shape if isinstance(size, str)}


def _at_length(windows: Sequence[WindowView], length: int | None) -> list[WindowView]:
    """The windows over the sequence that is compared."""
    return [view if length is None else replace(view, length=length) for view in windows]


def _compare(
    sides: tuple[Side, Side], trial: Trial, outputs: Arrays, expected: Arrays, tolerance: Tolerance
) -> list[Comparison]:
    """One comparison for each of the judge's outputs; where the trial is the largest, with the spread of its errors.

    Raises:
        CheckFailed: the file lacks an output, or it has another shape.
    """
    model, judge = sides
    missing = [name for name in expected if name not in outputs]
    if missing:
        raise CheckFailed(
            f"{model.path.name} has no output {missing[0]!r}.",
            why=f"{model.path.name} returns {', '.join(outputs)}; {judge.path.name} returns {', '.join(expected)}.",
        )
    return [
        compare_arrays(name, outputs[name], expected[name], tolerance, sequence=_along(sides, trial, name, expected))
        for name in expected
    ]


def _along(sides: tuple[Side, Side], trial: Trial, name: str, expected: Arrays) -> SequenceAxis | None:
    """Where the sequence is in an output: on the axis that its class has it on, if that has an input's size."""
    if not trial.largest:
        return None
    told = [*steps_of(sides), *(side for side in sides if side.sidecar is not None), sides[0]][0]
    axis, shape = told.sequence_axis(name), expected[name].shape
    if not -len(shape) <= axis < len(shape) or shape[axis] not in {n for x in trial.inputs.values() for n in x.shape}:
        return None
    return SequenceAxis(axis)
