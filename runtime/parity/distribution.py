"""Measure the effect of rounded weights on a model's use: its next token, or the embedding of a text.

A next token is chosen by the logits at a position. An embedding is the mean of a text's last hidden states.

Source of the divergence: S. Kullback, R. A. Leibler, On Information and Sufficiency (1951).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.tolerance import Tolerance

# The names of logits, and of hidden states `[batch, n, dim]`, in exported models.
LOGITS, HIDDEN_STATES = "logits", "last_hidden_state"
# Elements converted to float64 at a time, and at least a position: they stay in a processor's cache.
_CHUNK = 1 << 15
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

    positions: int = 0
    divergences: float = 0.0
    agreeing: int = 0

    def __add__(self, other: Distribution) -> Distribution:
        return Distribution(
            self.positions + other.positions, self.divergences + other.divergences, self.agreeing + other.agreeing
        )

    @property
    def divergence(self) -> float:
        """Mean divergence per position, in nats; infinite without positions."""
        return self.divergences / self.positions if self.positions else math.inf

    @property
    def agreement(self) -> float:
        """Share of the positions with the same largest logit."""
        return self.agreeing / self.positions if self.positions else 0.0

    def meets(self, tolerance: Tolerance) -> bool:
        """Return whether both figures are within a tolerance, with a margin for chance in a share of few positions."""
        if tolerance.divergence is not None and not self.divergence <= tolerance.divergence:
            return False
        floor = tolerance.agreement or 0.0
        chance = _CHANCE * math.sqrt(floor * (1 - floor) / max(1, self.positions))
        return self.agreement >= floor - chance

    def figures(self) -> dict[str, float]:
        """Return the figures for reports."""
        return {"divergence": self.divergence, "agreement": self.agreement}


@dataclass(frozen=True)
class Pooled:
    """Cosines of the embeddings of texts: the means of their hidden states over the positions that count.

    Args:
        texts: with finite embeddings on both sides.
        cosines: sum of the cosines of their embeddings with the reference's.
        least: the smallest of these; 1 without any.
    """

    texts: int = 0
    cosines: float = 0.0
    least: float = 1.0

    def __add__(self, other: Pooled) -> Pooled:
        return Pooled(self.texts + other.texts, self.cosines + other.cosines, min(self.least, other.least))

    @property
    def cosine(self) -> float:
        """Mean cosine per text; 0 without texts."""
        return self.cosines / self.texts if self.texts else 0.0

    def meets(self, tolerance: Tolerance) -> bool:
        """Return whether the mean cosine is within a tolerance."""
        return tolerance.cosine is None or self.cosine >= tolerance.cosine

    def figures(self) -> dict[str, float]:
        """Return the figures for reports."""
        return {"pooled_cosine": self.cosine, "least_pooled_cosine": self.least}


def compare_pooled(actual: NDArray[Any], expected: NDArray[Any], rows: NDArray[np.bool_] | None = None) -> Pooled:
    """Compare the embeddings of texts, from hidden states of equal shape `[batch, n, dim]`.

    Args:
        actual: the result.
        expected: the reference.
        rows: `[batch, n]`, True where a position counts; None counts all. A text without any is left out.
    """
    kept = np.ones(actual.shape[:2], np.bool_) if rows is None else np.asarray(rows)
    found = Pooled()
    for a, e, positions in zip(actual, expected, kept, strict=True):
        if positions.any():
            found += _embedding(a[positions].astype(np.float64).mean(0), e[positions].astype(np.float64).mean(0))
    return found


def _embedding(actual: NDArray[np.float64], expected: NDArray[np.float64]) -> Pooled:
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return Pooled()
    norms = float(np.linalg.norm(actual) * np.linalg.norm(expected))
    same = 1.0 if np.array_equal(actual, expected) else 0.0
    cosine = float(actual @ expected) / norms if norms else same
    return Pooled(1, cosine, cosine)


def compare_distributions(
    actual: NDArray[Any], expected: NDArray[Any], rows: NDArray[np.bool_] | None = None
) -> Distribution:
    """Compare logits of equal shape `[…, tokens]`; positions with NaN or Inf are left out.

    Args:
        actual: the result.
        expected: the reference.
        rows: True where a position counts, over the leading dimensions; None counts all.
    """
    width = actual.shape[-1]
    a, e = actual.reshape(-1, width), expected.reshape(-1, width)
    counted = np.ones(actual.shape[:-1], np.bool_)
    if rows is not None:
        counted &= np.asarray(rows).reshape(rows.shape + (1,) * (counted.ndim - rows.ndim))
    positions = np.flatnonzero(counted)
    step, found = max(1, _CHUNK // max(1, width)), Distribution()
    for start in range(0, len(positions), step):
        part = positions[start : start + step]
        found += _part(a[part].astype(np.float64), e[part].astype(np.float64))
    return found


def _part(actual: NDArray[np.float64], expected: NDArray[np.float64]) -> Distribution:
    kept = np.isfinite(actual).all(-1) & np.isfinite(expected).all(-1)
    if not kept.all():
        actual, expected = actual[kept], expected[kept]
    if not len(actual):
        return Distribution()
    agreeing = int((actual.argmax(-1) == expected.argmax(-1)).sum())
    actual, expected = (x - x.max(-1, keepdims=True) for x in (actual, expected))
    weights = np.exp(expected)
    whole, other = weights.sum(-1), np.exp(actual).sum(-1)
    # With p = weights / whole:  Σ p·(log p - log q) = Σ p·(e - a) - log whole + log other.
    divergences = (weights * (expected - actual)).sum(-1) / whole - np.log(whole) + np.log(other)
    return Distribution(len(actual), float(divergences.sum()), agreeing)
