"""Measure how far one array is from another, and say whether a tolerance accepts it.

Python and numpy are enough: bundles carry this file to devices, so that `verify.py` there and the package here cannot
come to different results.

The figures keep a frontier: the few pairs (|expected|, error) such that any tolerance `atol + rtol·|expected|` that
accepts them accepts every other pair too. They are the upper-left convex hull of all pairs, so what holds for them
holds for the whole array.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
Frontier = tuple[tuple[float, float], ...]
# Called with flat positions of finite elements, their expected sizes and their errors; for NaN and Inf with None as
# errors.
Watch = Callable[[Places, Floats, "Floats | None"], None]

# Elements converted to float64 at a time: enough for numpy, the arrays made of them stay in a processor's cache, and
# OpenBLAS computes products of so few (below 10,000) in one thread: in several they take ten times as long.
_CHUNK = 1 << 13


@dataclass(frozen=True)
class Figures:
    """How far a result is from its reference, computed in float64.

    Args:
        count: how many elements were compared.
        finite: how many of them are finite; the sums are over these.
        max_abs: largest `|a - e|`.
        max_rel: largest `|a - e| / |e|` where `e` is not 0.
        error_squares: sum of `(a - e)²`.
        actual_squares: sum of `a²`.
        expected_squares: sum of `e²`.
        products: sum of `a·e`.
        not_finite: NaN and Inf in the result; the other figures leave them out.
        expected_not_finite: NaN and Inf in the reference.
        expected_low: smallest finite number of the reference; inf if there is none.
        expected_high: largest finite number of the reference; -inf if there is none.
        worst: flat position where the result is not finite, else where it breaks the tolerance most.
        frontier: pairs (|expected|, error) that decide for every tolerance.
    """

    count: int
    finite: int
    max_abs: float
    max_rel: float
    error_squares: float
    actual_squares: float
    expected_squares: float
    products: float
    not_finite: int
    expected_not_finite: int
    expected_low: float
    expected_high: float
    worst: int
    frontier: Frontier

    @property
    def rms(self) -> float:
        """Root mean square of `a - e`."""
        return math.sqrt(self.error_squares / self.finite) if self.finite else math.inf

    @property
    def relative_rms(self) -> float:
        """`rms` over the root mean square of `e`."""
        return _ratio(math.sqrt(self.error_squares), math.sqrt(self.expected_squares))

    @property
    def relative_max(self) -> float:
        """`max_abs` over the root mean square of `e`."""
        return _ratio(self.max_abs, math.sqrt(self.expected_squares / max(1, self.finite)))

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two arrays as vectors: 1 for two null vectors, 0 where only one is null."""
        norms = math.sqrt(self.actual_squares) * math.sqrt(self.expected_squares)
        if norms == 0:
            return 1.0 if self.actual_squares == self.expected_squares else 0.0
        return min(1.0, max(-1.0, self.products / norms))


def excess(frontier: Frontier, atol: float, rtol: float) -> float:
    """Return the largest `|a - e| - (atol + rtol·|e|)`; above 0 the tolerance is exceeded."""
    if not frontier:  # nothing finite was compared
        return math.inf
    return float(max(error - (atol + rtol * size) for size, error in frontier))


def accepts(figures: Any, atol: float, rtol: float, cosine: float | None) -> bool:
    """Check figures against a tolerance: `|a - e| ≤ atol + rtol·|e|` everywhere, and nothing NaN or Inf.

    Args:
        figures: `Figures`, or whatever has their attributes.
        atol: absolute part.
        rtol: part relative to the expected value.
        cosine: smallest cosine accepted; None where the cosine does not count.
    """
    if figures.not_finite or figures.expected_not_finite:
        return False
    if cosine is not None and not figures.cosine >= cosine:
        return False
    return excess(figures.frontier, atol, rtol) <= 0


def proves_nothing(figures: Any, atol: float | None, rtol: float | None, least: float | None) -> str:
    """Return why a comparison proves nothing even if it passes; "" if it proves something.

    Args:
        figures: `Figures`, or whatever has their attributes.
        atol: absolute part; None, as `rtol`, where single elements do not count.
        rtol: part relative to the expected value.
        least: smallest cosine accepted, or another bound over all elements that zeros exceed; None if there is none.
    """
    if not figures.finite:
        return "no number was compared"
    low, high = figures.expected_low, figures.expected_high
    largest = max(abs(low), abs(high))
    wide = (least is None or least <= 0) and (atol is None or largest <= atol + (rtol or 0.0) * largest)
    if wide and largest:
        return "the tolerance is so wide that an output of zeros would pass"
    if low == high and figures.finite > 1:
        return f"all {figures.finite:,} expected numbers are {low:g}"
    return ""


def measure(
    actual: NDArray[Any],
    expected: NDArray[Any],
    atol: float,
    rtol: float,
    keep: NDArray[np.bool_] | None = None,
    watch: Watch | None = None,
) -> Figures:
    """Measure a result against its reference, a chunk at a time.

    Args:
        actual: the result, any real element type.
        expected: the reference, of the same shape.
        atol: absolute part of the tolerance that chooses `worst`.
        rtol: its relative part.
        keep: True where an element counts, flat; None counts all.
        watch: called with every chunk.
    """
    sums = _Sums(atol, rtol, watch)
    flat_actual, flat_expected = actual.reshape(-1), expected.reshape(-1)
    for start in range(0, flat_actual.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        a, e = flat_actual[part].astype(np.float64), flat_expected[part].astype(np.float64)
        chosen = None if keep is None else keep[part]
        where = None
        if chosen is not None and not chosen.all():
            where = np.flatnonzero(chosen)
            a, e = a[where], e[where]
        sums.add_all(start, where, a, e)
    return sums.figures()


class _Sums:
    """Running sums over the chunks of one comparison."""

    def __init__(self, atol: float, rtol: float, watch: Watch | None) -> None:
        self.atol, self.rtol, self.watch = atol, rtol, watch
        self.count = 0
        self.finite = 0
        self.not_finite = 0
        self.expected_not_finite = 0
        self.expected_low, self.expected_high = math.inf, -math.inf
        self.first_not_finite: int | None = None
        self.max_abs = 0.0
        self.max_rel = 0.0
        self.error_squares = 0.0
        self.actual_squares = 0.0
        self.expected_squares = 0.0
        self.products = 0.0
        self.worst = 0
        self.worst_excess = -math.inf
        self.frontier: Frontier = ()

    def add_all(self, start: int, where: Places | None, actual: Floats, expected: Floats) -> None:
        """Add a chunk; elements that are NaN or Inf are only counted.

        Args:
            start: flat position of the chunk.
            where: places of the elements in the chunk; None where they are all of it.
            actual: the result.
            expected: its reference.
        """
        self.count += actual.size
        squares = _squares(actual, expected)
        if all(map(math.isfinite, squares)):  # as every element is then
            self.add(start, where, actual, expected, squares)
            return
        fine = np.isfinite(actual)
        if not fine.all():
            self.note_not_finite(_places(start, where, actual.size)[~fine])
        self.expected_not_finite += int((~np.isfinite(expected)).sum())
        fine &= np.isfinite(expected)
        kept = np.flatnonzero(fine)
        actual, expected = actual[kept], expected[kept]
        self.add(start, kept if where is None else where[kept], actual, expected, _squares(actual, expected))

    def note_not_finite(self, where: Places) -> None:
        self.not_finite += where.size
        if self.first_not_finite is None:
            self.first_not_finite = int(where[0])
        if self.watch is not None:
            self.watch(where, np.empty(0), None)

    def add(
        self, start: int, where: Places | None, actual: Floats, expected: Floats, squares: tuple[float, float]
    ) -> None:
        """Add finite elements of a chunk, with the sums of their squares; the rest as of `add_all`."""
        if not actual.size:
            return
        error, size = np.abs(actual - expected), np.abs(expected)
        self.finite += actual.size
        self.expected_low = min(self.expected_low, float(expected.min()))
        self.expected_high = max(self.expected_high, float(expected.max()))
        self.max_abs = max(self.max_abs, float(error.max()))
        relative = np.divide(error, size, out=np.zeros_like(error), where=size > 0)
        self.max_rel = max(self.max_rel, float(relative.max()))
        self.error_squares += float(error @ error)
        self.actual_squares += squares[0]
        self.expected_squares += squares[1]
        self.products += float(actual @ expected)
        beyond = error - (self.atol + self.rtol * size)
        worst = int(beyond.argmax())
        if beyond[worst] > self.worst_excess:
            self.worst_excess = float(beyond[worst])
            self.worst = start + (worst if where is None else int(where[worst]))
        self.frontier = extend_frontier(self.frontier, size, error)
        if self.watch is not None:
            self.watch(_places(start, where, actual.size), size, error)

    def figures(self) -> Figures:
        if self.first_not_finite is not None:
            self.worst = self.first_not_finite
        return Figures(**{entry.name: getattr(self, entry.name) for entry in fields(Figures)})


def _squares(actual: Floats, expected: Floats) -> tuple[float, float]:
    """Return the sums of squares of both arrays; not finite where an element is not, or where they overflow."""
    with np.errstate(all="ignore"):
        return float(actual @ actual), float(expected @ expected)


def _places(start: int, where: Places | None, size: int) -> Places:
    """Return the flat positions of the elements of a chunk."""
    return np.arange(start, start + size) if where is None else where + start


def _ratio(part: float, whole: float) -> float:
    if whole == 0:
        return 0.0 if part == 0 else math.inf
    return part / whole


def extend_frontier(frontier: Frontier, size: Floats, error: Floats) -> Frontier:
    """Extend a frontier by elements with these expected sizes and errors."""
    for known_size, known_error in frontier:
        # A smaller error at a larger expected value is accepted whenever the known one is. This
        # leaves few elements to sort after the first chunk.
        left = np.flatnonzero((size < known_size) | (error > known_error))
        if left.size < size.size:
            size, error = size[left], error[left]
    if frontier and not size.size:
        return frontier
    sizes = np.concatenate([size, [known for known, _ in frontier]])
    errors = np.concatenate([error, [known for _, known in frontier]])
    order = np.lexsort((-errors, sizes))
    sizes, errors = sizes[order], errors[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(errors)[:-1]])
    rising = errors > before
    return _upper_hull(list(zip(sizes[rising].tolist(), errors[rising].tolist(), strict=True)))


def _upper_hull(points: list[tuple[float, float]]) -> Frontier:
    """Drop points below the line between their neighbours; `points` rise in both coordinates."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) >= (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return tuple(hull)
