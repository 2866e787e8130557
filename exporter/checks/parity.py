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
from ...runtime.error_spread import SequenceAxis
from ...runtime.session import Session
from ..resident import give_back
from ..source import SourceModel

# Positions that a reference whose cost is quadratic in the length is asked for.
MOST_POSITIONS = 512
# Sequence length up to which a reference with a window is asked for every position.
WHOLE_UP_TO = 2048
# Last positions of a longer one, at the most.
_TAIL = 64


def compare_outputs(
    outputs: Mapping[str, NDArray[Any]],
    expected: Mapping[str, NDArray[Any]],
    tolerance: Tolerance,
    sequence: SequenceAxis | None = None,
) -> list[Comparison]:
    """One comparison for each output of the reference; with `sequence` it tells how its errors are spread.

    Raises:
        CheckFailed: an output is absent, or has another shape than the reference.
    """
    absent = np.empty(0)
    return [
        compare_arrays(name, outputs.get(name, absent), x, tolerance, sequence=sequence) for name, x in expected.items()
    ]


def compare_with_oracle(
    outputs: Mapping[str, NDArray[Any]],
    source: SourceModel,
    inputs: Mapping[str, NDArray[Any]],
    tolerance: Tolerance,
    *,
    spread: bool = False,
) -> list[Comparison]:
    """Compare a file's outputs with the oracle's on the same inputs.

    Of long sequences some positions are judged, see `judged_positions`. With `spread` the comparisons also tell how
    their errors are spread.

    Raises:
        CheckFailed: an output is absent, or has another shape than the reference.
    """
    positions = judged_positions(source)
    sequence = SequenceAxis(-2 if source.kind.batch_axis == 0 else 0, positions) if spread else None
    if positions is None:
        return compare_outputs(outputs, source.reference(inputs), tolerance, sequence)
    axis = 1 - source.kind.batch_axis
    sampled = {name: np.take(x, positions, axis) for name, x in outputs.items()}
    return compare_outputs(sampled, source.reference(inputs, positions), tolerance, sequence)


def judged_positions(source: SourceModel) -> NDArray[np.int64] | None:
    """The positions of a long sequence at which the oracle is asked, None for all.

    A reference that sums over the whole sequence: the ends, and others evenly between them. One with a window: the
    first window with the edge after it, and the last positions, from the last edge on if that is near. They are
    computed through their whole receptive field, so every layer is judged at its first and its last windows, and
    by what reaches the last positions from all windows that they see.
    """
    length, geometry = source.shapes.seq_len, source.geometry
    if not source.kind.samples or length <= (MOST_POSITIONS if geometry is None else WHOLE_UP_TO):
        return None
    if geometry is None:
        return np.unique(np.linspace(0, length - 1, MOST_POSITIONS).astype(np.int64))
    window = geometry.window_size
    last_edge = (length - 1) // window * window
    head, tail = window + 2, max(length - _TAIL, last_edge - 1)
    if _cost(source, 0, head) + _cost(source, tail, length) > 0.75 * source.depth * length:
        return None
    return np.unique(np.concatenate((np.arange(head), np.arange(tail, length))))


def _cost(source: SourceModel, first: int, end: int) -> int:
    """Positions that have to be computed for the outputs at `[first, end)`, over all layers."""
    assert source.geometry is not None
    length, total = source.shapes.seq_len, 0
    for _ in range(source.depth):
        first = source.geometry.receptive_interval(first, length)[0]
        end = source.geometry.receptive_interval(end - 1, length)[1]
        total += end - first
    return total


def check_parity(
    session: Session,
    source: SourceModel,
    dtype: str,
    tolerance: Tolerance,
    seeds: Sequence[int],
    first_run: dict[str, dict[str, NDArray[Any]]] | None = None,
) -> CheckRecord:
    """Compare on random inputs; the figures are those of the worst seed.

    `first_run` receives the first seed's "inputs" and "outputs", for checks that would run the same.
    """
    comparisons, sequences = [], source.shapes.batch
    for seed in seeds:
        inputs = random_inputs(source.inputs(dtype), seed, token_limit=source.token_limit)
        outputs = session.run(inputs)
        session.rest()  # the reference needs as much memory as the file
        give_back()
        if first_run is not None and not first_run:
            first_run.update(inputs=inputs, outputs=outputs)
        if source.kind.batch_axis == 0:
            # A reference in float64 is slow, and every sequence is computed alike: the first and the last do.
            few = sorted({0, source.shapes.batch - 1})
            sequences = len(few)
            inputs = {name: x if name == "attn_bias" else x[few] for name, x in inputs.items()}
            outputs = {name: x[few] for name, x in outputs.items()}
        comparisons += compare_with_oracle(outputs, source, inputs, tolerance)
    worst = max(comparisons, key=lambda comparison: comparison.excess(tolerance))
    windows, batch = source.shapes.seq_len / source.window_size, source.shapes.batch
    positions = judged_positions(source)
    return CheckRecord(
        name="parity",
        status="passed" if all(comparison.passed for comparison in comparisons) else "failed",
        detail=(
            f"max error {worst.max_abs:.1e} against the float64 oracle (tolerance {tolerance.atol:g} + "
            f"{tolerance.rtol:g}·|x|), {len(seeds)} seeds, {windows:.3g} windows"
            + (f", {sequences} of {batch} sequences" if batch > sequences else "")
            + ("" if positions is None else f", {len(positions)} of {source.shapes.seq_len} positions")
        ),
        figures=worst.figures(),
    )
