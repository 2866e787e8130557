"""Measure how far one result is from another, in figures that can be held against any tolerance later.

Besides the usual figures a `Comparison` keeps its frontier: the few pairs (|expected|, error) that
no tolerance `atol + rtol·|expected|` can accept without accepting every other pair too. They are the
upper-left convex hull of all pairs, so what holds of them holds of the whole array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.documents.error_spread import ErrorSpread
from ...core.errors import CheckFailed
from ...core.tensors import format_shape
from ...core.tolerance import Tolerance
from .spread import SequenceAxis, SpreadSums

Floats = NDArray[np.float64]
Frontier = tuple[tuple[float, float], ...]

# Elements converted to float64 at a time: enough for numpy, small beside any model.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Comparison:
    """Figures of one output against its reference, computed in float64.

    Args:
        name: of the output.
        tolerance: the criterion of `passed`.
        count: elements compared.
        max_abs: largest `|a - e|`.
        max_rel: largest `|a - e| / |e|` where `e` is not 0.
        rms: root mean square of `a - e`.
        relative_rms: `rms` over the root mean square of `e`.
        cosine: of the angle between the two as vectors; 1 if both are 0.
        not_finite: NaN and Inf in the actual result; any fails. The figures leave them out.
        expected_not_finite: NaN and Inf in the reference; any fails, since nothing can be compared there.
        worst_index: where the actual result is not finite, else where it breaks the tolerance most.
        frontier: pairs (|expected|, error) that decide for every tolerance.
        spread: the errors by size and along the sequence; None where nobody asked.
    """

    name: str
    tolerance: Tolerance
    count: int
    max_abs: float
    max_rel: float
    rms: float
    relative_rms: float
    cosine: float
    not_finite: int
    expected_not_finite: int
    worst_index: tuple[int, ...]
    frontier: Frontier
    spread: ErrorSpread | None = None

    @property
    def passed(self) -> bool:
        """Whether the comparison meets the tolerance it was made with."""
        return self.judge(self.tolerance)

    def judge(self, tolerance: Tolerance) -> bool:
        """Whether it meets another one, without the arrays."""
        if self.not_finite or self.expected_not_finite:
            return False
        if tolerance.cosine is not None and not self.cosine >= tolerance.cosine:
            return False
        return self.excess(tolerance) <= 0

    def excess(self, tolerance: Tolerance) -> float:
        """Largest `|a - e| - (atol + rtol·|e|)`; above 0 the tolerance is broken."""
        if not self.frontier:  # nothing finite was compared
            return math.inf
        return max(error - (tolerance.atol + tolerance.rtol * size) for size, error in self.frontier)

    def figures(self) -> dict[str, float | int | str]:
        """What reports and the sidecar show; JSON has no infinity, so that one is a string."""
        values = {
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "rms": self.rms,
            "relative_rms": self.relative_rms,
            "cosine": self.cosine,
        }
        shown: dict[str, float | int | str] = {
            name: value if math.isfinite(value) else str(value) for name, value in values.items()
        }
        shown["not_finite"] = self.not_finite
        shown["worst_index"] = format_shape(self.worst_index)
        shown["atol"] = self.tolerance.atol
        shown["rtol"] = self.tolerance.rtol
        return shown

    def to_dict(self) -> dict[str, Any]:
        """Everything, for saving; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Comparison:
        """A comparison as `to_dict` saved it, also by way of JSON."""
        return cls(
            **{
                **saved,
                "tolerance": Tolerance(**saved["tolerance"]),
                "worst_index": tuple(saved["worst_index"]),
                "frontier": tuple((size, error) for size, error in saved["frontier"]),
                "spread": ErrorSpread.from_dict(saved["spread"]) if saved.get("spread") else None,
            }
        )


def compare_arrays(
    name: str,
    actual: NDArray[Any],
    expected: NDArray[Any],
    tolerance: Tolerance,
    rows: NDArray[np.bool_] | None = None,
    sequence: SequenceAxis | None = None,
) -> Comparison:
    """Compare a result with its reference.

    Args:
        name: of the output, for reports.
        actual: the result, any real dtype.
        expected: the reference, of the same shape; the dtypes may differ.
        tolerance: the criterion.
        rows: True where a row counts, over the leading dimensions of the arrays (`[batch, n]` for
            outputs `[batch, n, dim]`); None counts all.

    Raises:
        CheckFailed: the shapes differ or nothing is left to compare: a comparison of nothing would
            pass whatever was computed.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        raise CheckFailed(
            f"Output {name!r} has another shape than its reference.",
            why=f"It is {format_shape(actual.shape)}, the reference is {format_shape(expected.shape)}.",
        )
    keep = _elements_that_count(name, actual.shape, rows)
    if not actual.size or (keep is not None and not keep.any()):
        raise CheckFailed(
            f"Nothing of output {name!r} can be compared.",
            why="The arrays are empty." if not actual.size else "No row of it counts.",
            fix="Use longer inputs, or a mask that keeps some rows.",
        )
    sums = _Sums(tolerance, None if sequence is None else SpreadSums(actual.shape, sequence))
    for start, a, e in _finite_chunks(actual, expected, keep, sums):
        sums.add(start, a, e)
    return sums.result(name, actual.shape)


def _elements_that_count(name: str, shape: tuple[int, ...], rows: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    """`rows` widened to one flag an element, flat (a view where numpy can give one)."""
    if rows is None:
        return None
    rows = np.asarray(rows)
    if rows.dtype != np.bool_ or rows.shape != shape[: rows.ndim]:
        raise CheckFailed(
            f"The row mask of output {name!r} does not fit.",
            why=f"It is {rows.dtype} {format_shape(rows.shape)} for {format_shape(shape)}.",
            fix="Give bools over the leading dimensions.",
        )
    widened = rows.reshape(rows.shape + (1,) * (len(shape) - rows.ndim))
    return np.broadcast_to(widened, shape).reshape(-1)


def _finite_chunks(
    actual: NDArray[Any], expected: NDArray[Any], keep: NDArray[np.bool_] | None, sums: _Sums
) -> Iterator[tuple[NDArray[np.intp], Floats, Floats]]:
    """Flat positions and both values in float64, a chunk at a time, without what is not finite.

    What is left out for being NaN or Inf is counted in `sums`.
    """
    flat_actual, flat_expected = actual.reshape(-1), expected.reshape(-1)
    for start in range(0, flat_actual.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        a = flat_actual[part].astype(np.float64)
        e = flat_expected[part].astype(np.float64)
        where = np.arange(start, start + a.size)
        if keep is not None:
            chosen = keep[part]
            a, e, where = a[chosen], e[chosen], where[chosen]
        sums.count += a.size
        fine = np.isfinite(a)
        if not fine.all():
            sums.note_not_finite(where[~fine])
        sums.expected_not_finite += int((~np.isfinite(e)).sum())
        fine &= np.isfinite(e)
        yield where[fine], a[fine], e[fine]


class _Sums:
    """Running sums over the chunks of one comparison."""

    def __init__(self, tolerance: Tolerance, spread: SpreadSums | None) -> None:
        self.tolerance = tolerance
        self.spread = spread
        self.count = 0
        self.finite = 0
        self.not_finite = 0
        self.expected_not_finite = 0
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

    def note_not_finite(self, where: NDArray[np.intp]) -> None:
        self.not_finite += where.size
        if self.first_not_finite is None:
            self.first_not_finite = int(where[0])
        if self.spread is not None:
            self.spread.add_not_finite(where)

    def add(self, where: NDArray[np.intp], actual: Floats, expected: Floats) -> None:
        if not actual.size:
            return
        error, size = np.abs(actual - expected), np.abs(expected)
        self.finite += actual.size
        self.max_abs = max(self.max_abs, float(error.max()))
        relative = error[size > 0] / size[size > 0]
        self.max_rel = max(self.max_rel, float(relative.max(initial=0.0)))
        self.error_squares += float(error @ error)
        self.actual_squares += float(actual @ actual)
        self.expected_squares += float(expected @ expected)
        self.products += float(actual @ expected)
        excess = error - (self.tolerance.atol + self.tolerance.rtol * size)
        worst = int(excess.argmax())
        if excess[worst] > self.worst_excess:
            self.worst_excess, self.worst = float(excess[worst]), int(where[worst])
        self.frontier = _extend_frontier(self.frontier, size, error)
        if self.spread is not None:
            self.spread.add(where, error, excess > 0)

    def result(self, name: str, shape: tuple[int, ...]) -> Comparison:
        place = self.worst if self.first_not_finite is None else self.first_not_finite
        rms = math.sqrt(self.error_squares / self.finite) if self.finite else math.inf
        return Comparison(
            name=name,
            tolerance=self.tolerance,
            count=self.count,
            max_abs=self.max_abs,
            max_rel=self.max_rel,
            rms=rms,
            relative_rms=_ratio(math.sqrt(self.error_squares), math.sqrt(self.expected_squares)),
            cosine=self._cosine(),
            not_finite=self.not_finite,
            expected_not_finite=self.expected_not_finite,
            worst_index=tuple(int(i) for i in np.unravel_index(place, shape)),
            frontier=self.frontier,
            spread=None if self.spread is None else self.spread.result(),
        )

    def _cosine(self) -> float:
        """Of the angle between the vectors; two null vectors agree, a null and another do not."""
        norms = math.sqrt(self.actual_squares) * math.sqrt(self.expected_squares)
        if norms == 0:
            return 1.0 if self.actual_squares == self.expected_squares else 0.0
        return min(1.0, max(-1.0, self.products / norms))


def _ratio(part: float, whole: float) -> float:
    if whole == 0:
        return 0.0 if part == 0 else math.inf
    return part / whole


def _extend_frontier(frontier: Frontier, size: Floats, error: Floats) -> Frontier:
    """The frontier of what it covered and these elements together."""
    left = np.ones(size.shape, dtype=np.bool_)
    for known_size, known_error in frontier:
        # A smaller error at a larger expected value is accepted whenever the known one is. This
        # leaves few elements to sort after the first chunk.
        left &= (size < known_size) | (error > known_error)
    sizes = np.concatenate([size[left], [known for known, _ in frontier]])
    errors = np.concatenate([error[left], [known for _, known in frontier]])
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
