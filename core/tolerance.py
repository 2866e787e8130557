"""Define how much two results may differ, in one table by precision that every check reads.

Three sorts of criteria, each a row of numbers:

- single elements: `|a - e| ≤ atol + rtol·|e|` everywhere;
- figures over all elements: cosine, relative error, and for logits the divergence and the agreement of the largest one.
  They are for files whose weights are rounded to 8 or 4 bits, and for small outputs, where single elements say little;
- in fp32, fp16 and bf16 a `Baseline`, the error that the untouched module itself makes in that precision: a file that
  exceeds the table is still right if its own error is no more than a multiple of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_Size = TypeVar("_Size", float, "NDArray[np.float64]")

# Largest allowed ratio of a file's error to the untouched module's own, as root mean squares over all inputs.
BASELINE_FACTOR = 1.5
# The same for the largest errors. Each is the error of one element, mostly at a position whose softmax is close to
# a tie: between two correct computations in bf16 their ratio was up to 2.3 (docs/numerics.md).
LARGEST_FACTOR = 4.0


@dataclass(frozen=True)
class Baseline:
    """The error that the untouched module itself makes in a precision, against the reference of the file.

    All figures are in units of the root mean square of the expected outputs, so that they hold for other inputs too.

    Args:
        dtype: "fp32", "fp16" or "bf16".
        relative_rms: root mean square of the error.
        relative_max: the largest error.
        source: what was run, and what measured it.
        typical_rms: the median of the root mean squares of single sets of inputs; None where it was not recorded.
    """

    dtype: str
    relative_rms: float
    relative_max: float
    source: str
    typical_rms: float | None = None


@dataclass(frozen=True)
class Tolerance:
    """Define a criterion; a part that is None does not count.

    Args:
        atol: absolute part of what a single element may differ by, ≥ 0; None, as `rtol`, where only figures count.
        rtol: part relative to the expected value, ≥ 0.
        cosine: least cosine similarity.
        relative_rms: largest root mean square error over the root mean square of the expected values.
        divergence: for logits, largest mean Kullback-Leibler divergence of their softmax, in nats.
        agreement: for logits, least share of positions at which the largest logit is the same one.
        takes_baseline: whether the untouched module's own error counts, where it can be measured.
        baseline: that error.

    Raises:
        UsageError: a negative or non-finite bound, or a cosine outside [-1, 1].
    """

    atol: float | None
    rtol: float | None
    cosine: float | None = None
    relative_rms: float | None = None
    divergence: float | None = None
    agreement: float | None = None
    takes_baseline: bool = False
    baseline: Baseline | None = None

    def __post_init__(self) -> None:
        for name in ("atol", "rtol", "relative_rms", "divergence", "agreement"):
            value = getattr(self, name)
            # Written so that NaN fails too: a NaN tolerance would accept or refuse everything.
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} is {value}.", why="A tolerance is a finite number.", fix="Give 0 or more.")
        if self.cosine is not None and not -1 <= self.cosine <= 1:
            raise UsageError(f"The cosine floor is {self.cosine}.", why="A cosine lies between -1 and 1.")

    def allowed(self, size: _Size) -> _Size:
        """Return how much elements of these magnitudes may differ; 0 if only figures over all elements count.

        With 0, the element that breaks the tolerance most is the one with the largest error.
        """
        return (self.atol or 0.0) + (self.rtol or 0.0) * size

    def scaled(self, factor: float) -> Tolerance:
        """Return the tolerance with its absolute part in other units, and without the baseline."""
        atol = None if self.atol is None else self.atol * factor
        return replace(self, atol=atol, takes_baseline=False, baseline=None)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Tolerance:
        """Read a tolerance from what `dataclasses.asdict` returned, also by way of JSON."""
        baseline = saved.get("baseline")
        return cls(**{**saved, "baseline": None if baseline is None else Baseline(**baseline)})

    def describe(self) -> str:
        """Describe the criterion in words, for reports."""
        parts = [] if self.atol is None else [f"{self.atol:g} + {self.rtol or 0:g}·|x|"]
        for value, text in (
            (self.relative_rms, "relative rms at most {:g}"),
            (self.divergence, "divergence of logits at most {:g} nats"),
            (self.agreement, "same largest logit at {:.0%} of positions at least"),
            (self.cosine, "cosine at least {:g}"),
        ):
            parts += [] if value is None else [text.format(value)]
        text = ", ".join(parts)
        if self.baseline is not None:
            text += f"; or {BASELINE_FACTOR:g} times the untouched module's own error in {self.baseline.dtype} on the "
            text += f"median input, all errors together and the largest element {LARGEST_FACTOR:g} times"
        return text


# fp32 has a bound on the error over all elements, because outputs smaller than its absolute part (probabilities over a
# large vocabulary, a layer that is scaled down) would pass whatever they are. Correct files are far below it. Logits of
# trained models with a root mean square of 7 to 22 are beyond its absolute part in PyTorch too: there the baseline
# counts.
# Half precision gets a cosine floor: 1e-2 absolute alone would pass small outputs that are all wrong. Its bound on the
# error finds those of a wrong scale, which no cosine shows: errors without one are below 0.045 at that cosine. The rest
# of the rule is the baseline. bf16's absolute part is five times fp16's, as in comparable projects.
# Rounded weights: on random tokens, which were harder for these models than text, int8 files had cosines from 0.9969
# on, relative errors up to 0.079, divergences up to 0.051 and agreements from 0.78 on; weights of 4 bits in blocks of
# 32 had 0.9966, 0.083, 0.062 and 0.74 in trained models (docs/numerics.md).
# In the order from fine to coarse, which `coarsest` reads.
TOLERANCES = {
    "fp32": Tolerance(1e-4, 1e-4, relative_rms=1e-2, takes_baseline=True),
    "fp16": Tolerance(1e-2, 1e-2, cosine=0.999, relative_rms=0.1, takes_baseline=True),
    "bf16": Tolerance(5e-2, 2e-2, cosine=0.999, relative_rms=0.1, takes_baseline=True),
    "int8": Tolerance(None, None, cosine=0.99, relative_rms=0.14, divergence=0.1, agreement=0.7),
    "int8-dynamic": Tolerance(None, None, cosine=0.99, relative_rms=0.14, divergence=0.1, agreement=0.7),
    "int8-qdq": Tolerance(None, None, cosine=0.99, relative_rms=0.14, divergence=0.1, agreement=0.7),
    "fp8": Tolerance(None, None, cosine=0.99, relative_rms=0.14, divergence=0.1, agreement=0.7),
    "int4": Tolerance(None, None, cosine=0.985, relative_rms=0.17, divergence=0.15, agreement=0.6),
}

# Weights in blocks whose graph and stored numbers are proven apart (docs/checks.md): what is left is what rounding
# costs a model, which its report states. Only a file that is ruined is refused: models that keep text apart from
# nonsense have agreements above 0.6; what 8 bits ruined behind a massive first token had cosines of 0.48 and 0.76, and
# agreements of 0.03 and 0.28.
RUINED = {
    kind: Tolerance(None, None, cosine=0.9, relative_rms=0.45, divergence=0.5, agreement=0.5)
    for kind in ("int8", "int4")
}


def coarsest(dtypes: Iterable[str]) -> str:
    """Return the element type with the widest tolerance; types missing in the table come first."""
    order = list(TOLERANCES)
    return max(dtypes, key=lambda dtype: order.index(dtype) if dtype in order else len(order))


def tolerance_for(
    dtype: str, atol: float | None = None, rtol: float | None = None, *, proven: bool = False
) -> Tolerance:
    """Return the tolerance for a precision; if the user sets a part, only single elements count.

    Args:
        dtype: "fp32", "fp16", "bf16", or a kind of weights: "int8", "int8-dynamic", "int8-qdq", "fp8",
            "int4".
        atol: replaces the table's absolute part.
        rtol: replaces the table's relative part.
        proven: graph and stored weights are proven apart: a file of rounded weights is refused only if it is ruined.

    Raises:
        UsageError: an unknown element type, or a value that is not a tolerance.
    """
    try:
        tolerance = TOLERANCES[dtype]
    except KeyError:
        raise UsageError(
            f"There is no tolerance for element type {dtype!r}.", fix=f"Known: {', '.join(TOLERANCES)}."
        ) from None
    tolerance = RUINED.get(dtype, tolerance) if proven else tolerance
    if atol is None and rtol is None:
        return tolerance
    absolute, relative = tolerance.atol or 0.0, tolerance.rtol or 0.0
    return Tolerance(absolute if atol is None else atol, relative if rtol is None else rtol, cosine=tolerance.cosine)
