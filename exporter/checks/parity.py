"""Check: the file's outputs equal the fp64 oracle's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.sidecar import CheckRecord
from ...core.tolerance import Tolerance
from ...runtime.arrays import random_inputs
from ...runtime.compare import Comparison, compare_arrays
from ...runtime.session import Session
from ..source import SourceModel

# Positions that a reference whose cost is quadratic in the length is asked for.
MOST_POSITIONS = 512


def compare_outputs(
    outputs: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]], tolerance: Tolerance
) -> list[Comparison]:
    """One comparison for each output of the reference.

    Raises:
        CheckFailed: an output is absent, or has another shape than the reference.
    """
    absent = np.empty(0)
    return [compare_arrays(name, outputs.get(name, absent), x, tolerance) for name, x in expected.items()]


def compare_with_oracle(
    outputs: Mapping[str, NDArray[Any]],
    source: SourceModel,
    inputs: Mapping[str, NDArray[Any]],
    tolerance: Tolerance,
) -> list[Comparison]:
    """Compare a file's outputs with the oracle's on the same inputs.

    An oracle that sums over the whole sequence for every position is asked for some positions only where the
    sequence is long: the ends, and others evenly between them.

    Raises:
        CheckFailed: an output is absent, or has another shape than the reference.
    """
    length = source.shapes.seq_len
    if not source.kind.samples or length <= MOST_POSITIONS:
        return compare_outputs(outputs, source.reference(inputs), tolerance)
    positions = np.unique(np.linspace(0, length - 1, MOST_POSITIONS).astype(np.int64))
    sampled = {name: x[positions] for name, x in outputs.items()}  # such an output is [T, B, D]
    return compare_outputs(sampled, source.reference(inputs, positions), tolerance)


def check_parity(
    session: Session, source: SourceModel, dtype: str, tolerance: Tolerance, seeds: Sequence[int]
) -> CheckRecord:
    """Compare on random inputs; the figures are those of the worst seed."""
    comparisons, sequences = [], source.shapes.batch
    for seed in seeds:
        inputs = random_inputs(source.inputs(dtype), seed, token_limit=source.token_limit)
        outputs = session.run(inputs)
        if source.kind.batch_axis == 0:
            # A reference in float64 is slow, and every sequence is computed alike: the first and the last do.
            few = sorted({0, source.shapes.batch - 1})
            sequences = len(few)
            inputs = {name: x if name == "attn_bias" else x[few] for name, x in inputs.items()}
            outputs = {name: x[few] for name, x in outputs.items()}
        comparisons += compare_with_oracle(outputs, source, inputs, tolerance)
    worst = max(comparisons, key=lambda comparison: comparison.excess(tolerance))
    windows, batch = source.shapes.seq_len / source.window_size, source.shapes.batch
    return CheckRecord(
        name="parity",
        status="passed" if all(comparison.passed for comparison in comparisons) else "failed",
        detail=(
            f"max error {worst.max_abs:.1e} against the float64 oracle (tolerance {tolerance.atol:g} + "
            f"{tolerance.rtol:g}·|x|), {len(seeds)} seeds, {windows:.3g} windows"
            + (f", {sequences} of {batch} sequences" if batch > sequences else "")
        ),
        figures=worst.figures(),
    )
