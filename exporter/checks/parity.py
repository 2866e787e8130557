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


def compare_outputs(
    outputs: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]], tolerance: Tolerance
) -> list[Comparison]:
    """One comparison for each output of the reference.

    Raises:
        CheckFailed: an output is absent, or has another shape than the reference.
    """
    absent = np.empty(0)
    return [compare_arrays(name, outputs.get(name, absent), x, tolerance) for name, x in expected.items()]


def check_parity(
    session: Session, source: SourceModel, dtype: str, tolerance: Tolerance, seeds: Sequence[int]
) -> CheckRecord:
    """Compare on random inputs; the figures are those of the worst seed."""
    batch = source.shapes.batch
    rows = sorted({0, batch - 1})  # a reference in float64 is slow, and every sequence is computed alike
    batched = [spec.name for spec in source.inputs(dtype) if spec.name != "attn_bias"]
    comparisons = []
    for seed in seeds:
        inputs = random_inputs(source.inputs(dtype), seed, token_limit=source.token_limit)
        outputs = {name: x[rows] for name, x in session.run(inputs).items()}
        few = inputs | {name: inputs[name][rows] for name in batched}
        comparisons += compare_outputs(outputs, source.reference(few), tolerance)
    worst = max(comparisons, key=lambda comparison: comparison.excess(tolerance))
    windows = source.shapes.seq_len / source.geometry.window_size
    return CheckRecord(
        name="parity",
        status="passed" if all(comparison.passed for comparison in comparisons) else "failed",
        detail=(
            f"max error {worst.max_abs:.1e} against the float64 oracle (tolerance {tolerance.atol:g} + "
            f"{tolerance.rtol:g}·|x|), {len(seeds)} seeds, {windows:.3g} windows"
            + (f", {len(rows)} of {batch} sequences" if batch > len(rows) else "")
        ),
        figures=worst.figures(),
    )
