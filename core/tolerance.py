"""How much two results may differ: one table by element type, read by every check."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .errors import UsageError


@dataclass(frozen=True)
class Tolerance:
    """The criterion `|a - e| ≤ atol + rtol·|e|` everywhere and `cosine(a, e) ≥ cosine`.

    Args:
        atol: absolute part, ≥ 0.
        rtol: part relative to the expected value, ≥ 0.
        cosine: floor of the cosine similarity; None where the cosine is not judged.

    Raises:
        UsageError: a negative or non-finite part, or a floor outside [-1, 1].
    """

    atol: float
    rtol: float
    cosine: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            # Written so that NaN fails too: a NaN tolerance would accept or refuse everything.
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} is {value}.", why="A tolerance is a finite number.", fix="Give 0 or more.")
        if self.cosine is not None and not -1 <= self.cosine <= 1:
            raise UsageError(f"The cosine floor is {self.cosine}.", why="A cosine lies between -1 and 1.")

    def describe(self) -> str:
        """The criterion in words, for reports."""
        floor = "" if self.cosine is None else f", cosine ≥ {self.cosine:g}"
        return f"atol {self.atol:g}, rtol {self.rtol:g}{floor}"


# Half precision gets a cosine floor: 1e-2 absolute alone would pass small outputs that are all wrong.
# In the order from fine to coarse, which `coarsest` reads.
TOLERANCES = {
    "fp32": Tolerance(1e-4, 1e-4),
    "fp16": Tolerance(1e-2, 1e-2, cosine=0.999),
    # bf16 has 8 bits where fp16 has 11, and an engine without bf16 rounds at every operator, where with fp16 it leaves
    # some roundings out: ten times fp16's. Trained models use the same share of both (docs/numerics.md).
    "bf16": Tolerance(1e-1, 1e-1, cosine=0.999),
    # fp32 with dynamic int8 matrices. The cosine is what judges: single logits (up to 10) of a trained 4-layer model
    # were off by 1.8 on random tokens and 0.8 on real ones, where cosines were 0.9991 and 0.9998.
    "int8": Tolerance(2.5, 1e-1, cosine=0.995),
}


def coarsest(dtypes: Iterable[str]) -> str:
    """The element type with the widest tolerance; one that the table lacks, and `tolerance_for` refuses, goes first."""
    order = list(TOLERANCES)
    return max(dtypes, key=lambda dtype: order.index(dtype) if dtype in order else len(order))


def tolerance_for(dtype: str, atol: float | None = None, rtol: float | None = None) -> Tolerance:
    """The tolerance of a model's element type, with the parts the user set replaced.

    Args:
        dtype: "fp32", "fp16", "bf16", or "int8" for fp32 with int8 matrices.
        atol: replaces the table's absolute part.
        rtol: replaces the table's relative part.

    Raises:
        UsageError: an unknown element type or a value that is no tolerance.
    """
    try:
        tolerance = TOLERANCES[dtype]
    except KeyError:
        raise UsageError(
            f"There is no tolerance for element type {dtype!r}.", fix=f"Known: {', '.join(TOLERANCES)}."
        ) from None
    return replace(
        tolerance,
        atol=tolerance.atol if atol is None else atol,
        rtol=tolerance.rtol if rtol is None else rtol,
    )
