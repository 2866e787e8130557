"""Statistics of samples, and their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...core.documents.bench_report import CONFIDENCE, OTHERS, Histogram, Latency, Ratio

Samples = NDArray[np.float64]

_BINS = 40


def latency(milliseconds: Samples, percentiles: Sequence[float]) -> Latency:
    """Return mean, percentiles and spread; `std` is the sample's (divided by n - 1), 0 for a single call."""
    values = np.percentile(milliseconds, sorted(percentiles))
    return Latency(
        mean=float(milliseconds.mean()),
        std=float(milliseconds.std(ddof=1)) if len(milliseconds) > 1 else 0.0,
        min=float(milliseconds.min()),
        max=float(milliseconds.max()),
        percentiles={f"p{p:g}": float(v) for p, v in zip(sorted(percentiles), values, strict=True)},
    )


def histogram(milliseconds: Samples) -> Histogram:
    """Count calls in equal bins up to the 99th percentile.

    Without that limit one slow call would squeeze all others into one bin.
    """
    low, high = float(milliseconds.min()), float(np.percentile(milliseconds, 99))
    inside = milliseconds[milliseconds <= high]
    bins = max(1, min(_BINS, math.isqrt(len(milliseconds))))
    counts, edges = np.histogram(inside, bins=bins, range=(low, high) if high > low else (low * 0.999, low * 1.001))
    return Histogram(
        edges=[float(edge) for edge in edges],
        counts=[int(count) for count in counts],
        beyond=len(milliseconds) - len(inside),
    )


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Return an interval that contains the true median with at least this confidence.

    It inverts the sign test: the median lies between the k-th smallest and the k-th largest of n values unless fewer
    than k values fall on one side of it. The binomial distribution gives the probability of that, whatever the values'
    own distribution. One outlier in a dozen rounds hardly moves it. None where n is too small (n < 6 at 95 %).

    Source: W. J. Conover, Practical Nonparametric Statistics, on order statistics as limits of a quantile.
    """
    n = len(values)
    tail, k = 0.0, 0
    while k < n // 2:
        tail += math.comb(n, k) / 2**n  # the probability that exactly k values lie below the median
        if 2 * tail > 1 - confidence:
            break
        k += 1
    if k == 0:
        return None
    ordered = sorted(values)
    return ordered[k - 1], ordered[n - k]


def paired_ratio(label: str, rounds: Sequence[float], against: Sequence[float], *, busy: bool = False) -> Ratio:
    """Compare times with another candidate round by round, so that a slowdown of a whole round cancels out.

    Args:
        label: of the other.
        rounds: median time of each round, in any unit.
        against: median times of the other, in the same rounds.
        busy: other programs kept the machine busy for more than half of the time; then there is no interval.
    """
    ratios = [own / other for own, other in zip(rounds, against, strict=True)]
    low, high = (None, None) if busy else median_interval(ratios) or (None, None)
    return Ratio(against=label, value=float(np.median(ratios)), low=low, high=high, busy=busy)


def busy_share(others: Sequence[float]) -> float | None:
    """Return the share of turns in which other programs used too much of the processors for reliable figures.

    None if there are no turns with a known share.
    """
    return float(np.mean([share > OTHERS for share in others])) if others else None


def spread(rounds: Sequence[float]) -> float:
    """Return how far the rounds differ: the middle 80 % of their medians, relative to the median of all."""
    p10, median, p90 = np.percentile(rounds, [10, 50, 90])
    return float((p90 - p10) / median)


def drift(rounds: Sequence[float]) -> float:
    """Return how much slower the first third of the rounds was than the last, relative; 0 under 6 rounds."""
    third = len(rounds) // 3
    if third < 2:
        return 0.0
    return float(np.median(rounds[:third]) / np.median(rounds[-third:]) - 1)
