"""Measure what rounded weights change in a language model's next token, from its logits at each position.

Source of the divergence: S. Kullback, R. A. Leibler, On Information and Sufficiency (1951).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.tolerance import Tolerance

# The name of the logits in exported language models.
LOGITS = "logits"
# Elements converted to float64 at a time.
_CHUNK = 1 << 20
# Standard deviations by which a share of few positions may lie below its floor.
_CHANCE = 2.0


@dataclass(frozen=True)
class Distribution:
    """Sums over the positions of logits.

    Args:
        positions: with finite logits on both sides.
        divergences: sum of the Kullback-Leibler divergences of the result's softmax from the reference's, in nats.
        agreeing: positions at which the largest logit is the same one.
    """

    positions: int
    divergences: float
    agreeing: int

    def __add__(self, other: Distribution) -> Distribution:
        return Distribution(
            self.positions + other.positions, self.divergences + other.divergences, self.agreeing + other.agreeing
        )

    @property
    def divergence(self) -> float:
        """Mean divergence a position, in nats; infinite without any."""
        return self.divergences / self.positions if self.positions else math.inf

    @property
    def agreement(self) -> float:
        """Share of the positions with the same largest logit."""
        return self.agreeing / self.positions if self.positions else 0.0

    def meets(self, tolerance: Tolerance) -> bool:
        """Return whether both figures are within a tolerance, with a margin for chance in a share of few positions."""
        if tolerance.divergence is not None and not self.divergence <= tolerance.divergence:
            return False
        floor = tolerance.agreement
        if floor is None:
            return True
        chance = _CHANCE * math.sqrt(floor * (1 - floor) / max(1, self.positions))
        return self.agreement >= floor - chance

    def figures(self) -> dict[str, float | int | str]:
        """Return the figures for reports; infinity becomes a string, because JSON has none."""
        divergence = self.divergence
        return {
            "divergence": divergence if math.isfinite(divergence) else str(divergence),
            "agreement": self.agreement,
        }


def compare_distributions(actual: NDArray[Any], expected: NDArray[Any]) -> Distribution:
    """Compare logits of equal shape `[…, tokens]`; positions with NaN or Inf are left out."""
    width = actual.shape[-1]
    rows, found = max(1, _CHUNK // width), Distribution(0, 0.0, 0)
    a, e = actual.reshape(-1, width), expected.reshape(-1, width)
    for start in range(0, len(a), rows):
        found += _part(a[start : start + rows].astype(np.float64), e[start : start + rows].astype(np.float64))
    return found


def _part(actual: NDArray[np.float64], expected: NDArray[np.float64]) -> Distribution:
    kept = np.isfinite(actual).all(-1) & np.isfinite(expected).all(-1)
    actual, expected = actual[kept], expected[kept]
    if not len(actual):
        return Distribution(0, 0.0, 0)
    q, p = _log_softmax(actual), _log_softmax(expected)
    agreeing = int((actual.argmax(-1) == expected.argmax(-1)).sum())
    return Distribution(len(actual), float((np.exp(p) * (p - q)).sum()), agreeing)


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
