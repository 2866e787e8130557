"""Compare a model with a reference, output by output. Every comparison of two models in this package is made here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.documents.proof import GOLDEN_CHECK, proven_apart, proven_by_golden
from ...core.documents.sidecar import CheckRecord
from ...core.documents.window_view import WindowView
from ...core.errors import CheckFailed, UsageError
from ...core.geometry import WindowGeometry
from ...core.tolerance import Tolerance, coarsest, tolerance_for
from ..session import Arrays
from .baseline import BaselineMeter, Known, table_alone, with_baseline
from .comparison import Comparison, compare_arrays, largest_error, unproven_outputs
from .distribution import LOGITS
from .golden import Golden, GoldenRunner, GoldenSample, check_type, kept_rows, key_mask
from .inputs import InputSets
from .overflow import range_record, unproven
from .report import ParityReport, ParityRequest, Reference, not_finite, overall
from .runner import FileRunner, Runner, Sample, take_sample
from .shared_inputs import shared_specs
from .spread import SequenceAxis

_LENGTHS = "Record the model on sequences of that length."
_log = logging.getLogger(__name__)


# Returns which rows of an output count, from its name, result and reference; None counts all. May refuse the output.
Rows = Callable[[str, NDArray[Any], NDArray[Any]], NDArray[np.bool_] | None]


class Compared(NamedTuple):
    """The candidate's outputs, the reference's outputs, each whole or in part, and one comparison for each."""

    outputs: Arrays
    expected: Arrays
    comparisons: list[Comparison]


def compare(
    candidate: Runner,
    reference: Runner,
    inputs: Arrays,
    tolerance: Tolerance | Callable[[NDArray[Any]], Tolerance],
    *,
    spread: bool = False,
    whole: bool = False,
    expected: Arrays | None = None,
    rows: Rows | None = None,
) -> Compared:
    """Run a model and its reference on the same inputs, and compare the outputs by name.

    Args:
        candidate: the model in question.
        reference: the model it must equal.
        inputs: for both.
        tolerance: how far apart they may be; or a function that says so for an expected output.
        spread: record how the errors are distributed by size and along the sequence.
        whole: return the candidate's outputs whole, and not only the part that the reference computes.
        expected: the reference's outputs on these inputs, where they are known.
        rows: chooses the rows of an output that count; by default those that the reference counts.

    Raises:
        CheckFailed: the candidate lacks an output, or it has another shape than the reference's.
        UsageError: one of them does not take the inputs.
    """
    sample = reference.sample(inputs)
    outputs = candidate.run(inputs) if whole or spread else candidate.run_sampled(inputs, sample)
    if expected is None:
        expected = reference.run(inputs)
    missing = [name for name in expected if name not in outputs]
    if missing:
        raise CheckFailed(
            f"{candidate.name} has no output {missing[0]!r}.",
            why=f"{candidate.name} returns {', '.join(outputs)}; {reference.name} returns {', '.join(expected)}.",
        )
    comparisons = []
    for name, wanted in expected.items():
        sequence = _sequence(candidate, reference, name, outputs[name].shape, inputs, sample) if spread else None
        sampled = take_sample(outputs[name], sample) if whole or spread else outputs[name]
        criterion = tolerance(wanted) if callable(tolerance) else tolerance
        kept = reference.counted(inputs, wanted.shape) if rows is None else rows(name, sampled, wanted)
        comparisons.append(compare_arrays(name, sampled, wanted, criterion, kept, sequence))
    return Compared(outputs, expected, comparisons)


def worst_of(comparisons: Sequence[tuple[str, Comparison]], tolerance: Tolerance) -> tuple[str, Comparison]:
    """Return the worst comparison with the name of its inputs: one with NaN, else the furthest beyond a tolerance."""
    return max(comparisons, key=lambda named: named[1].severity(tolerance))


def _windows_in_words(name: str, whose: str, windows: Sequence[WindowView]) -> dict[str, Any]:
    """Describe the windows of one model of a failed comparison as JSON types, each with its number of layers."""
    return {
        "of": name,
        "whose": whose,
        "windows": [f"{view.describe()} ({view.depth} layer{'s' * (view.depth > 1)})" for view in windows],
    }


def _sequence(
    candidate: Runner, reference: Runner, name: str, shape: tuple[int, ...], inputs: Arrays, sample: Sample
) -> SequenceAxis | None:
    """Find the sequence axis of an output: the axis that a model states, if its size matches an input's."""
    stated = (runner.sequence_axis(name) for runner in (candidate, reference))
    axis = next((axis for axis in stated if axis is not None), -2)
    if not -len(shape) <= axis < len(shape) or shape[axis] not in {n for x in inputs.values() for n in x.shape}:
        return None
    chosen = {axis % len(shape): chosen for axis, chosen in sample.items()}.get(axis % len(shape))
    return SequenceAxis(axis, None if chosen is None else np.flatnonzero(chosen))


def compare_golden(
    candidate: FileRunner,
    golden: Golden,
    tolerance: Tolerance,
    *,
    skip_masked: bool,
    progress: Callable[[str], None] = lambda _: None,
    meter: BaselineMeter | None = None,
) -> Iterator[tuple[GoldenSample, Compared]]:
    """Compare a file, in each of its run modes, with golden outputs; a step file is fed call by call.

    Args:
        candidate: the file.
        golden: inputs and outputs of the user's own model.
        tolerance: the criterion.
        skip_masked: leave out the positions that the input `mask` hides. A checkpoint's file has zeros in rows without
            any visible key, where upstream's values have no meaning (docs/numerics.md, "Departures from upstream").
        progress: called with the name of each sample as it begins.
        meter: measures the unmodified module's own error in half precision.

    Raises:
        UsageError: the golden file does not fit the model.
        CheckFailed: an output has another shape than the golden one.
    """
    reference = GoldenRunner(golden)

    def kept(
        mask: NDArray[Any] | None, name: str, actual: NDArray[Any], wanted: NDArray[Any]
    ) -> NDArray[np.bool_] | None:
        check_type(golden.path, name, wanted, actual)
        return kept_rows(mask, wanted.shape) if skip_masked else None

    for sample in golden.bind(
        candidate.inputs, candidate.outputs, candidate.token_limits or candidate.token_limit, candidate.limits
    ):
        refused = candidate.refuses(sample.inputs)
        if refused is not None:
            raise UsageError(f"{candidate.name} does not accept {sample.name}.", why=f"{refused}.", fix=_LENGTHS)
        missed = False
        for mode in candidate.modes():
            named = sample._replace(name=sample.name + mode.mode)
            progress(f"Comparing: {named.name}")
            rows = partial(kept, key_mask(sample.inputs))
            found = compare(mode, reference, sample.inputs, tolerance, spread=True, expected=sample.outputs, rows=rows)
            yield named, found
            missed = missed or not all(comparison.passed for comparison in found.comparisons)
        if meter is not None:
            meter.take(reference, sample.inputs, sample.outputs, missed=missed)


def golden_record(
    found: Sequence[tuple[str, Comparison]],
    golden: Golden,
    tolerance: Tolerance,
    windows: Sequence[WindowGeometry],
    meter: BaselineMeter | None = None,
) -> CheckRecord:
    """Summarise comparisons with golden outputs in a check record.

    Args:
        found: by name of the sample, one comparison an output.
        golden: the golden outputs they were compared with.
        tolerance: the criterion.
        windows: of the model's layers; the record notes those that the sequences are too short to prove.
        meter: of the unmodified module in half precision, after the last sample.
    """
    if meter is not None:
        tolerance = with_baseline(tolerance, meter.result())
    outputs = overall(found, tolerance).values()
    nothing, why = unproven_outputs(outputs, tolerance)
    if not outputs:
        return CheckRecord(name=GOLDEN_CHECK, status="not proven", detail=why)
    worst = max(outputs, key=lambda output: (not output.passed, output.severity(tolerance)))
    error = largest_error([worst])
    if not all(output.passed for output in outputs):
        where, _ = worst_of([part for part in found if part[1].name == worst.name], tolerance)
        detail = f"output {worst.name!r} of {where}: {error}, beyond {tolerance.describe()}"
        return CheckRecord(name=GOLDEN_CHECK, status="failed", detail=detail, figures=worst.figures())
    doubts = [reason for reason in (why, golden.too_short(windows)) if reason]
    short = nothing or bool(golden.too_short(windows))
    detail = f"{error} against your model's own outputs ({tolerance.describe()}), {len(golden.samples)} sample(s)"
    return CheckRecord(
        name=GOLDEN_CHECK,
        status="not proven" if short else "passed",
        detail="; ".join([detail, *doubts]),
        figures=worst.figures(),
        baseline=tolerance.baseline,
    )


def compare_models(
    request: ParityRequest,
    candidate: FileRunner,
    reference: Runner,
    described: Reference,
    windows: Sequence[WindowView],
    notes: Sequence[str],
    progress: Callable[[str], None],
    baseline: Known | Callable[[], Known],
    unproven: Sequence[str] = (),
) -> ParityReport:
    """Compare a file with its reference in all its run modes, on every set of inputs; with golden outputs first.

    Args:
        request: seeds, lengths, inputs and tolerances.
        candidate: the file.
        reference: the model it must equal.
        described: the reference as reports name it; its element type counts if it is coarser than the candidate's.
        windows: of the model's attention layers.
        notes: what the user should know of the two models.
        progress: called with each step as it begins.
        baseline: where the precision takes one, the unmodified module to measure it with, one that was measured
            before, or why there is none.
        unproven: arguments that the weights do not show, and that golden outputs may prove.

    Raises:
        UsageError: the two do not take the same inputs, or not those asked for.
        CheckFailed: an output is missing or has another shape than the reference's.
    """
    specs = shared_specs(candidate.inputs, reference.inputs, (candidate.name, reference.name))
    precision = coarsest([candidate.precision, described.dtype or candidate.precision])
    sets = InputSets(request, specs, (candidate, reference), _geometries(windows), precision)
    views = [view if sets.length is None else replace(view, length=sets.length) for view in windows]
    extra = [name for name in candidate.outputs if name not in reference.outputs]
    alone = [f"output {name!r} is in {candidate.name} only" for name in extra]
    report = new_report(request, candidate, described, views, [*notes, *alone, *sets.notes], unproven)
    tolerance = report.tolerance
    meter = BaselineMeter(baseline, report.dtype) if tolerance.takes_baseline else None
    if request.golden is not None:
        take_golden(Golden.read(request.golden), request, candidate, report, progress, baseline)
    refusal = ""
    for inputs in sets:
        refused = reference.refuses(inputs.arrays)
        if refused is not None:
            refusal = f"not compared at {inputs.sizes}: {refused}"
            report.notes += [refusal] if refusal not in report.notes else []
            continue
        report.notes += not_finite(inputs.arrays)
        sets.count(inputs)
        expected, missed = None, False
        for mode in candidate.modes():
            progress(f"Comparing: {inputs.name}{mode.mode}")
            outputs, expected, comparisons = compare(
                mode, reference, inputs.arrays, tolerance, spread=inputs.largest, whole=True, expected=expected
            )
            missed = missed or not all(comparison.passed for comparison in comparisons)
            report.take(inputs.name + mode.mode, inputs.arrays, outputs, comparisons)
            report.alone |= {inputs.name + mode.mode} if inputs.alone else set()
            for found in comparisons:
                verdict = "equal" if found.passed else "NOT equal"
                _log.info("%s%s, %s: max error %.3g, %s", inputs.name, mode.mode, found.name, found.max_abs, verdict)
        if meter is not None and expected is not None:
            if meter.measures:
                progress(f"Measuring the untouched module in {report.dtype}: {inputs.name}")
            meter.take(reference, inputs.arrays, expected, missed=missed)
        del outputs, expected  # before the next ones are made: logits of a large vocabulary are large
    report.judged_on = sets.describe()
    report.range = range_of(request, candidate, report.judged_on)
    if not report.with_reference:
        why = f"{refusal.rstrip('.')}." if refusal else "There are no inputs to compare on."
        raise UsageError("No set of inputs was accepted by both.", why=why, fix="Give inputs of other lengths.")
    if meter is not None:
        report.tolerance = with_baseline(tolerance, meter.result())
        if meter.why_none:
            report.notes.append(table_alone(meter.why_none))
    if not report.passed:
        others = reference.windows if isinstance(reference, FileRunner) else windows
        report.compared_windows = [
            _windows_in_words(candidate.name, "the file", candidate.windows),
            _windows_in_words(reference.name, "the reference", others),
        ]
    if request.keep_reference and report.outputs.keys() <= set(
        candidate.outputs
    ):  # comparisons with golden outputs exist already
        report.outputs = report.outputs | _called_reference(reference.unsampled().run(report.inputs))
    return report


def range_of(request: ParityRequest, candidate: FileRunner, where: str) -> CheckRecord | None:
    """Return how large the fp16 values of a file were in its runs so far; None if it is not in fp16, or not rounded.

    Args:
        request: whether fp16 is rounded.
        candidate: the file.
        where: on which inputs.
    """
    found = range_record(candidate.sessions, where)
    if found is None and request.rounds and candidate.dtype == "fp16":
        place = f"in {candidate.backend} on {candidate.provider}"
        return unproven(f"the sizes of values were not measured {place}; onnxruntime on the CPU measures them")
    return found


def _called_reference(outputs: Arrays) -> Arrays:
    """Return outputs under the names for saving them together with the candidate's."""
    return {f"{name}.reference": array for name, array in outputs.items()}


def new_report(
    request: ParityRequest,
    candidate: FileRunner,
    described: Reference,
    windows: Sequence[WindowView],
    notes: Sequence[str],
    unproven: Sequence[str],
) -> ParityReport:
    """Return a report without comparisons; arguments as of `compare_models`."""
    precision = coarsest([candidate.precision, described.dtype or candidate.precision])
    checks = () if candidate.sidecar is None else candidate.sidecar.checks
    proven = LOGITS in candidate.outputs and proven_apart(checks)
    return ParityReport(
        precision,
        candidate.provider,
        request.model,
        request.against,
        tolerance_for(precision, request.atol, request.rtol, proven=proven),
        list(windows),
        candidate.plugin,
        candidate.sidecar,
        described,
        notes=list(notes),
        unproven=list(unproven),
    )


def _geometries(windows: Sequence[WindowView]) -> list[WindowGeometry]:
    return [view.geometry for view in windows if not view.biases]


def take_golden(
    golden: Golden,
    request: ParityRequest,
    candidate: FileRunner,
    report: ParityReport,
    progress: Callable[[str], None],
    baseline: Known | Callable[[], Known],
) -> None:
    """Compare with golden outputs, and begin a report with the results.

    Raises:
        UsageError: the golden file does not fit the model.
        CheckFailed: an output has another shape than the golden one.
    """
    precision = golden.coarsened(candidate.precision)
    tolerance = tolerance_for(precision, request.atol, request.rtol)
    meter = BaselineMeter(baseline, precision) if tolerance.takes_baseline else None
    found = []
    sidecar = candidate.sidecar
    # The export of a user's own module lists its layers, and computes those rows as upstream does.
    of_checkpoint = sidecar is not None and not sidecar.layers
    pairs = compare_golden(candidate, golden, tolerance, skip_masked=of_checkpoint, progress=progress, meter=meter)
    for sample, compared in pairs:
        outputs = compared.outputs
        if request.keep_reference:
            outputs = outputs | _called_reference(sample.outputs)
        report.take(sample.name, sample.inputs, outputs, compared.comparisons)
        found += [(sample.name, comparison) for comparison in compared.comparisons]
    report.golden = golden_record(found, golden, tolerance, _geometries(report.windows), meter)
    report.golden_count = len(found)
    report.golden_tolerance = tolerance if meter is None else with_baseline(tolerance, meter.result())
    if proven_by_golden([report.golden]):
        report.unproven = []
