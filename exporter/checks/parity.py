"""Check: the file's outputs equal the reference's, on random inputs or over a sweep of sizes.

The reference is the float64 one of a checkpoint, or the module as the user wrote it, run by PyTorch: in float64 where
it runs so, so that the difference is the file's own error, else in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...core.documents.sidecar import PARITY, CheckRecord
from ...core.error_texts import first_line
from ...core.errors import CheckFailed, UsageError
from ...core.tolerance import Tolerance
from ...runtime.inputs.arrays import random_inputs
from ...runtime.parity.baseline import BaselineMeter, beside, both_errors, table_alone
from ...runtime.parity.compare import compare, worst_of
from ...runtime.parity.comparison import Comparison, outcome_of, unproven_outputs
from ...runtime.parity.inputs import InputSet
from ...runtime.parity.report import overall, verdicts
from ...runtime.parity.runner import Runner, Sample, SessionRunner
from ...runtime.session import Arrays, Session
from ..models.inference import bounded
from ..source.reference_runner import ReferenceRunner
from ..source.source_model import SourceModel
from ..source.untouched_module import untouched_module
from .outcome import not_proven


def check_parity(
    session: Session,
    source: SourceModel,
    dtype: str,
    tolerance: Tolerance,
    seeds: Sequence[int],
    first_run: dict[str, Arrays] | None = None,
) -> CheckRecord:
    """Compare a file of fixed sizes with the float64 reference on random inputs; the figures are over all seeds.

    `first_run` receives the first seed's "inputs" and "outputs", so that other checks need not run them again.

    Raises:
        CheckFailed: an output is absent, or has another shape than the reference's.
    """
    candidate = SessionRunner(session, rests=True)  # the reference needs as much memory as the file
    reference = ReferenceRunner(source, dtype, samples=True, few_sequences=source.family.batch_axis == 0)
    meter = baseline_meter(source, dtype, tolerance)
    found: list[tuple[str, Comparison]] = []
    sample: Sample = {}
    for seed in seeds:
        inputs = random_inputs(source.inputs(dtype), seed, token_limit=source.token_limit)
        outputs, expected, comparisons = compare(candidate, reference, inputs, tolerance)
        if meter is not None:
            meter.take(reference, inputs, expected)
        sample = reference.sample(inputs)
        if first_run is not None and not first_run:
            first_run.update(inputs=inputs, outputs=outputs)
        found += [(f"seed {seed}", comparison) for comparison in comparisons]
    windows = source.shapes.seq_len / source.window_size
    detail = f"{len(seeds)} seeds, {windows:.3g} windows"
    for axis, what in ((source.family.batch_axis, "sequences"), (reference.sequence_axis(), "positions")):
        if axis in sample:
            detail += f", {sample[axis].sum()} of {sample[axis].size} {what}"
    return parity_record(found, reference, tolerance, detail, meter)


def baseline_meter(source: SourceModel, dtype: str, tolerance: Tolerance) -> BaselineMeter | None:
    """Return the meter of upstream's own error in half precision; None if the tolerance does not use it."""
    return BaselineMeter(untouched_module(source, dtype), dtype) if tolerance.takes_baseline else None


def check_input_sets(
    session: Session,
    reference: Runner,
    sets: Iterable[InputSet],
    tolerance: Tolerance,
    meter: BaselineMeter | None = None,
) -> CheckRecord:
    """Compare a file with a reference on sets of inputs.

    Sizes that the reference itself refuses leave a dynamic axis not proven, because there is nothing to compare with.

    Args:
        session: the written file.
        reference: the untouched module, or the float64 reference.
        sets: inputs for both; the reference must accept the first set.
        tolerance: the allowed difference.
        meter: measures the untouched module's own error in half precision.

    Raises:
        CheckFailed: the file refuses inputs that the reference accepts, or its outputs differ.
    """
    candidate = SessionRunner(session)
    found: list[tuple[str, Comparison]] = []
    ran: list[str] = []
    refused = []
    for inputs in sets:
        try:
            expected = reference.run(inputs.arrays)
        except Exception as error:
            if not ran:
                raise
            refused.append((inputs.name, first_line(error, 100)))
            continue
        ran.append(inputs.name)
        try:
            comparisons = compare(candidate, reference, inputs.arrays, tolerance, expected=expected).comparisons
        except UsageError as error:
            raise CheckFailed(f"The file refuses what the module takes: {inputs.name}.", why=error.what) from error
        found += [(inputs.name, comparison) for comparison in comparisons]
        if meter is not None:
            meter.take(reference, inputs.arrays, expected)
    if not found:
        return not_proven("no inputs were compared")
    detail = f"{len(ran)} sets of inputs, worst at {worst_of(found, tolerance)[0]}"
    record = parity_record(found, reference, tolerance, detail, meter, trials=len(ran), refused=len(refused))
    detail, status = record.detail, record.status
    if refused:
        unknown = bounded([name for name, _ in refused], 8)
        why = f"which the reference itself refuses ({refused[0][1]})"
        detail = f"equal at {bounded(ran, 8)}; not known at {unknown}, {why}; {detail}"
        status = "not proven" if status == "passed" else status
    if status == "failed":
        passed = verdicts(found, beside(tolerance, record.baseline))
        failed = list(dict.fromkeys(name for (name, _), good in zip(found, passed, strict=True) if not good))
        detail = f"{len(failed)} of {len(ran)} sets of inputs differ ({', '.join(failed[:5])}); {detail}"
    return record.model_copy(update={"detail": detail, "status": status})


def parity_record(
    found: Sequence[tuple[str, Comparison]],
    reference: Runner,
    tolerance: Tolerance,
    detail: str,
    meter: BaselineMeter | None = None,
    **figures: int,
) -> CheckRecord:
    """Make the record of comparisons, with the figures of the worst output.

    The record is failed if an output fails over all comparisons together.

    Args:
        found: the comparisons, each with the name of its inputs.
        reference: the model that the file was compared with.
        tolerance: the criterion.
        detail: which inputs were compared.
        meter: the meter of the untouched module, after its last inputs.
        figures: more figures for the record.
    """
    baseline = None if meter is None else meter.result()
    tolerance = beside(tolerance, baseline)
    outputs = list(overall(found, tolerance).values())
    nothing, why = unproven_outputs(outputs, tolerance)
    if not outputs:
        return not_proven(why)
    worst = max(outputs, key=lambda output: (not output.passed, output.excess(tolerance)))
    text = f"{_error(worst)} against {reference.name} (tolerance {tolerance.describe()}), {detail}"
    if baseline is not None:
        text += f"; {both_errors(worst, baseline)}"
    elif meter is not None:
        text += f"; {table_alone(meter.why_none)}"
    passed = all(output.passed for output in outputs)
    if passed and why:
        text = f"{why}; {text}" if nothing else f"{text}; {why}"
    return CheckRecord(
        name=PARITY,
        status=outcome_of(passed, nothing),
        detail=text,
        figures={**worst.figures(), **figures},
        baseline=baseline,
    )


def _error(comparison: Comparison) -> str:
    """Describe an error: the largest of one element, and other figures if the tolerance is not per element."""
    if comparison.not_finite or comparison.expected_not_finite:  # the largest error is of the other numbers
        count, whose = (
            (comparison.not_finite, "file") if comparison.not_finite else (comparison.expected_not_finite, "reference")
        )
        return f"{count} of {comparison.count} numbers of the {whose} are NaN or infinite"
    text = f"max error {comparison.max_abs:.1e}"
    most = comparison.tolerance.relative_rms
    if comparison.tolerance.atol is None:
        text += f", relative rms {comparison.relative_rms:.2g}, cosine {comparison.cosine:.5g}"
    elif most is not None and comparison.relative_rms > most:
        text += f", relative rms {comparison.relative_rms:.2g}"
    if comparison.distribution is not None:
        text += f", divergence {comparison.distribution.divergence:.2g} nats"
        text += f", same largest logit at {comparison.distribution.agreement:.1%} of positions"
    if comparison.pooled is not None:
        text += f", cosine of pooled embeddings {comparison.pooled.cosine:.5g} (least {comparison.pooled.least:.5g})"
    return text
