"""Check: the file's outputs equal the reference's, on random inputs or over a sweep of sizes.

The reference is the float64 one of a checkpoint, or the module as the user wrote it, run by PyTorch: in float64 where
it can be doubled, so that the difference is the file's own error, else in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...core.documents.sidecar import CheckRecord
from ...core.errors import CheckFailed, UsageError
from ...core.tolerance import Tolerance
from ...runtime.inputs.arrays import random_inputs
from ...runtime.parity.compare import compare, worst_of
from ...runtime.parity.comparison import Comparison
from ...runtime.parity.inputs import InputSet
from ...runtime.parity.runner import Runner, Sample, SessionRunner
from ...runtime.session import Arrays, Session
from ..source.reference_runner import ReferenceRunner
from ..source.source_model import SourceModel

_NAME = "parity"


def check_parity(
    session: Session,
    source: SourceModel,
    dtype: str,
    tolerance: Tolerance,
    seeds: Sequence[int],
    first_run: dict[str, Arrays] | None = None,
) -> CheckRecord:
    """Compare a file of fixed sizes with the float64 reference on random inputs; the figures are the worst seed's.

    `first_run` receives the first seed's "inputs" and "outputs", for checks that would run the same.

    Raises:
        CheckFailed: an output is absent, or has another shape than the reference's.
    """
    candidate = SessionRunner(session, rests=True)  # the reference needs as much memory as the file
    reference = ReferenceRunner(source, dtype, samples=True, few_sequences=source.kind.batch_axis == 0)
    found: list[tuple[str, Comparison]] = []
    sample: Sample = {}
    for seed in seeds:
        inputs = random_inputs(source.inputs(dtype), seed, token_limit=source.token_limit)
        outputs, _, comparisons = compare(candidate, reference, inputs, tolerance)
        sample = reference.sample(inputs)
        if first_run is not None and not first_run:
            first_run.update(inputs=inputs, outputs=outputs)
        found += [(f"seed {seed}", comparison) for comparison in comparisons]
    windows = source.shapes.seq_len / source.window_size
    detail = f"{worst_error(found, reference, tolerance)}, {len(seeds)} seeds, {windows:.3g} windows"
    for axis, what in ((source.kind.batch_axis, "sequences"), (reference.sequence_axis(), "positions")):
        if axis in sample:
            detail += f", {sample[axis].sum()} of {sample[axis].size} {what}"
    return parity_record(found, tolerance, detail)


def check_input_sets(
    session: Session, reference: Runner, sets: Iterable[InputSet], tolerance: Tolerance
) -> CheckRecord:
    """Compare a file with a reference on sets of inputs; those that the reference itself refuses are counted.

    Args:
        session: the written file.
        reference: the untouched module, or the float64 reference.
        sets: inputs for both; the first must be one that the reference takes.
        tolerance: how far apart they may be.

    Raises:
        CheckFailed: the file refuses what the reference takes, or its outputs are others.
    """
    candidate, ran = SessionRunner(session), 0
    found: list[tuple[str, Comparison]] = []
    refused, failed = [], []
    for inputs in sets:
        try:
            expected = reference.run(inputs.arrays)
        except Exception as error:
            if not ran:
                raise
            refused.append(f"{inputs.name} ({type(error).__name__})")
            continue
        ran += 1
        try:
            comparisons = compare(candidate, reference, inputs.arrays, tolerance, expected=expected).comparisons
        except UsageError as error:
            raise CheckFailed(f"The file refuses what the module takes: {inputs.name}.", why=error.what) from error
        found += [(inputs.name, comparison) for comparison in comparisons]
        failed += [inputs.name for comparison in comparisons if not comparison.passed]
    detail = (
        f"{worst_error(found, reference, tolerance)}, {ran} sets of inputs, worst at {worst_of(found, tolerance)[0]}"
    )
    if refused:
        detail += f"; which itself refuses {len(refused)}: {', '.join(refused[:3])}"
    if failed:
        detail = f"{len(failed)} of {ran} sets of inputs differ ({', '.join(dict.fromkeys(failed[:5]))}); {detail}"
    return parity_record(found, tolerance, detail, trials=ran, refused=len(refused))


def worst_error(found: Sequence[tuple[str, Comparison]], reference: Runner, tolerance: Tolerance) -> str:
    """The largest error of comparisons in words, with the tolerance."""
    largest = worst_of(found, tolerance)[1].max_abs
    return f"max error {largest:.1e} against {reference.name} (tolerance {tolerance.atol:g} + {tolerance.rtol:g}·|x|)"


def parity_record(
    found: Sequence[tuple[str, Comparison]], tolerance: Tolerance, detail: str, **figures: int
) -> CheckRecord:
    """The record of comparisons, failed if one did, with the figures of the worst."""
    return CheckRecord(
        name=_NAME,
        status="passed" if all(comparison.passed for _, comparison in found) else "failed",
        detail=detail,
        figures={**worst_of(found, tolerance)[1].figures(), **figures},
    )
