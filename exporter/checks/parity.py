"""Check that the file's outputs equal the reference's, on realistic inputs or over a sweep of sizes.

The reference is the float64 one of a checkpoint, or the module as the user wrote it, run by PyTorch: in float64 where
it runs so, so that the difference is the file's own error, else in fp32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ...core.documents.sidecar import PARITY, CheckRecord
from ...core.error_texts import first_line
from ...core.errors import CheckFailed, UsageError
from ...core.tensors import TensorSpec
from ...core.tolerance import Tolerance
from ...runtime.inputs.arrays import random_inputs
from ...runtime.parity.baseline import BaselineMeter, both_errors, table_alone, with_baseline
from ...runtime.parity.compare import compare, worst_of
from ...runtime.parity.comparison import Comparison, outcome_of, unproven_outputs
from ...runtime.parity.inputs import InputSet
from ...runtime.parity.report import overall, verdicts
from ...runtime.parity.runner import Runner, Sample, SessionRunner
from ...runtime.session import Arrays
from ...runtime.text_inputs.rows import Row
from ...runtime.text_inputs.tokens import Tokens
from ..models.inference import bounded
from ..source.reference_runner import ReferenceRunner
from ..source.source_model import SourceModel
from ..source.untouched_module import untouched_module
from .judged import MOST_TOKENS, MOST_WORK, Judged
from .outcome import not_proven


def check_parity(
    judged: Judged,
    source: SourceModel,
    dtype: str,
    tolerance: Tolerance,
    seeds: Sequence[int],
    first_run: dict[str, Arrays] | None = None,
    *,
    few: bool = False,
) -> CheckRecord:
    """Compare a file of fixed sizes with the float64 reference; the figures are over all inputs.

    With `few` they are one row of tokens.

    `first_run` receives the first seed's "inputs" and "outputs", so that other checks need not run them again.

    Raises:
        CheckFailed: an output is absent, or has another shape than the reference's, or fp16 overflows.
    """
    candidate = SessionRunner(judged.session, rests=True)  # the reference needs as much memory as the file
    reference = ReferenceRunner(source, dtype, samples=True, few_sequences=source.family.batch_axis == 0)
    meter = baseline_meter(source, dtype, tolerance)
    specs = source.inputs(dtype)
    found: list[tuple[str, Comparison]] = []
    sample: Sample = {}
    sets = list(_static_sets(judged, source, specs, seeds, few=few))
    for inputs in sets:
        kept = first_run is not None and not first_run and not judged.session.watched
        outputs, expected, comparisons = compare(candidate, reference, inputs.arrays, tolerance, whole=kept)
        judged.refuse_overflow(inputs.name)
        judged.count(inputs, specs)
        if first_run is not None and kept:
            first_run.update(inputs=inputs.arrays, outputs=outputs)
        del outputs  # before others are made: logits of a large vocabulary are large
        if meter is not None:
            missed = not all(comparison.passed for comparison in comparisons)
            meter.take(reference, inputs.arrays, expected, missed=missed)
        if judged.graph is not None:
            judged.graph.take(inputs.name, inputs.arrays, source, reference, expected)
        sample = reference.sample(inputs.arrays)
        del expected
        found += [(inputs.name, comparison) for comparison in comparisons]
    detail = f"{judged.describe()}, {in_windows(source.shapes.seq_len / source.window_size)}"
    for axis, what in ((source.family.batch_axis, "sequences"), (reference.sequence_axis(), "positions")):
        if axis in sample:
            detail += f", {sample[axis].sum()} of {sample[axis].size} {what}"
    alone = {inputs.name for inputs in sets if inputs.alone}
    return parity_record(found, reference, tolerance, detail, meter, alone)


def in_windows(count: float) -> str:
    """Say how many windows a length has."""
    text = f"{count:.3g}"
    return f"{text} window{'s' * (text != '1')}"


def _static_sets(
    judged: Judged, source: SourceModel, specs: Sequence[TensorSpec], seeds: Sequence[int], *, few: bool
) -> Iterator[InputSet]:
    """Yield the inputs of a file of fixed sizes: random inputs if they count, then realistic rows; few: one row."""

    def drawn(seed: int) -> Arrays:
        return random_inputs(specs, seed, token_limit=source.token_limit)

    length, batch = source.shapes.seq_len, source.shapes.batch
    weights = max(1, source.work)
    rows = judged.rows(length, length, length, specs)
    if not rows:
        yield from (InputSet(f"seed {seed}", drawn(seed)) for seed in seeds)
        return
    assert judged.tokens is not None
    if judged.takes_random and not few:
        yield InputSet(f"random tokens, seed {seeds[0]}", drawn(seeds[0]), random=True)
    whole = [_lengthened(row, place, length, judged.tokens) for place, row in enumerate(rows)]
    together = 1 if judged.judges_alone else batch
    fitting = min(MOST_WORK // weights, MOST_TOKENS) // (length * batch)
    most = 1 if few else max(len(seeds), min(len(whole) // together, fitting))
    # After the first row, rows that begin in another way and padded rows, which can show other faults.
    ordered = sorted(whole[1:], key=lambda row: not (row.opened or row.before or row.after))
    chosen = [whole[0], *ordered][: most * together]
    for place in range(0, len(chosen), together):
        yield judged.set_of(chosen[place : place + together], specs, {})


def _lengthened(row: Row, place: int, length: int, tokens: Tokens) -> Row:
    """Return a row at the length of a file: the same beginning, more text behind it, and the same sides padded."""
    padding = row.before + row.after
    kept = length if not padding else max(1, length * len(row.ids) // row.length)
    more = tokens.row(place, kept + len(row.ids))[: max(0, kept - len(row.ids))]
    ids = np.concatenate([row.ids, more])[:kept]
    return replace(row, ids=ids, before=(length - kept) * (row.before > 0), after=(length - kept) * (row.after > 0))


def baseline_meter(source: SourceModel, dtype: str, tolerance: Tolerance) -> BaselineMeter | None:
    """Return the meter of upstream's own error in a precision; None if the tolerance does not use it."""
    return BaselineMeter(partial(untouched_module, source, dtype), dtype) if tolerance.takes_baseline else None


def check_input_sets(
    judged: Judged,
    reference: Runner,
    sets: Iterable[InputSet],
    tolerance: Tolerance,
    meter: BaselineMeter | None = None,
) -> CheckRecord:
    """Compare a file with a reference on sets of inputs.

    Sizes that the reference itself refuses leave a dynamic axis not proven, because there is nothing to compare with.

    Args:
        judged: the written file.
        reference: the untouched module, or the float64 reference.
        sets: inputs for both; the reference must accept the first set.
        tolerance: the allowed difference.
        meter: measures the untouched module's own error in half precision.

    Raises:
        CheckFailed: the file refuses inputs that the reference accepts, or its fp16 overflows.
    """
    candidate = SessionRunner(judged.session)
    found: list[tuple[str, Comparison]] = []
    ran: list[str] = []
    alone: set[str] = set()
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
            raise CheckFailed(
                f"The file refuses inputs that the module accepts: {inputs.name}.", why=error.what
            ) from error
        judged.refuse_overflow(inputs.name)
        judged.count(inputs, reference.inputs or judged.session.inputs)
        found += [(inputs.name, comparison) for comparison in comparisons]
        alone |= {inputs.name} if inputs.alone else set()
        if meter is not None:
            missed = not all(comparison.passed for comparison in comparisons)
            meter.take(reference, inputs.arrays, expected, missed=missed)
        if judged.graph is not None and isinstance(reference, ReferenceRunner):
            judged.graph.take(inputs.name, inputs.arrays, reference.source, reference, expected)
        del expected  # before the next one is made: logits of a large vocabulary are large
    if not found:
        return not_proven("no inputs were compared")
    several = f"{len(ran)} set{'s' * (len(ran) != 1)} of inputs"
    detail = f"{judged.describe()}, in {several}, worst at {worst_of(found, tolerance)[0]}"
    record = parity_record(found, reference, tolerance, detail, meter, alone, trials=len(ran), refused=len(refused))
    detail, status = record.detail, record.status
    if refused:
        unknown = bounded([name for name, _ in refused], 8)
        why = f"which the reference refuses ({refused[0][1]})"
        detail = f"equal at {bounded(ran, 8)}; not compared at {unknown}, {why}; {detail}"
        status = "not proven" if status == "passed" else status
    if status == "failed":
        judge = with_baseline(tolerance, record.baseline)
        passed = verdicts(found, judge)
        by_itself = [name in alone and not part.judge(judge) for name, part in found]
        wrong = (not good or bad for good, bad in zip(passed, by_itself, strict=True))
        failed = list(dict.fromkeys(name for (name, _), bad in zip(found, wrong, strict=True) if bad))
        detail = f"{len(failed)} of {len(ran)} sets of inputs differ ({', '.join(failed[:5])}); {detail}"
    return record.model_copy(update={"detail": detail, "status": status})


def parity_record(
    found: Sequence[tuple[str, Comparison]],
    reference: Runner,
    tolerance: Tolerance,
    detail: str,
    meter: BaselineMeter | None = None,
    alone: Collection[str] = (),
    **figures: int,
) -> CheckRecord:
    """Make the record of comparisons, with the figures of the worst output.

    The record is failed if an output fails over all comparisons together, or over inputs that are judged alone.

    Args:
        found: the comparisons, each with the name of its inputs.
        reference: the model that the file was compared with.
        tolerance: the criterion.
        detail: which inputs were compared.
        meter: the meter of the untouched module, after its last inputs.
        alone: names of the inputs that are also judged separately.
        figures: more figures for the record.
    """
    baseline = None if meter is None else meter.result()
    tolerance = with_baseline(tolerance, baseline)
    outputs = list(overall(found, tolerance).values())
    nothing, why = unproven_outputs(outputs, tolerance)
    if not outputs:
        return not_proven(why)
    worst = max(outputs, key=lambda output: (not output.passed, output.excess(tolerance)))
    bad = [(name, part) for name, part in found if name in alone and not part.judge(tolerance)]
    if bad and worst.passed:
        name, worst = min(bad, key=lambda named: named[1].cosine)
        detail = f"on '{name}' alone; {detail}"
    text = f"{_error(worst)} against {reference.name} (tolerance {tolerance.describe()}), {detail}"
    if baseline is not None:
        text = f"{both_errors(worst, baseline)}; {text}"
    elif meter is not None and meter.why_none:
        text += f"; {table_alone(meter.why_none)}"
    passed = all(output.passed for output in outputs) and not bad
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
