"""Measure how far one result is from another, in figures that can later be checked against any tolerance.

The figures are those of `core/closeness.py`, which bundles carry, so here and on a device the same code compares. They
hold sums, so the comparisons of several sets of inputs can be merged: a file is checked over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core.closeness import Figures, Frontier, excess, extend_frontier, measure, proves_nothing
from ...core.documents.error_spread import ErrorSpread
from ...core.error_texts import argument
from ...core.errors import CheckFailed
from ...core.tensors import format_shape
from ...core.tolerance import BASELINE_FACTOR, LARGEST_FACTOR, Baseline, Tolerance
from .distribution import HIDDEN_STATES, LOGITS, Distribution, Pooled, compare_distributions, compare_pooled
from .spread import SequenceAxis, SpreadSums

if TYPE_CHECKING:
    from ...core.documents.sidecar import Outcome

# Figures of `Figures` that add up over parts, and those that reports show.
_SUMS = ("error_squares", "actual_squares", "expected_squares", "products")
_TOTALS = ("count", "finite", *_SUMS, "not_finite", "expected_not_finite")
_SHOWN = ("max_abs", "max_rel", "rms", "relative_rms", "relative_max", "cosine")


@dataclass(frozen=True, kw_only=True)
class Comparison(Figures):
    """Figures of one output against its reference, computed in float64; the others are those of `Figures`.

    Args:
        name: of the output.
        tolerance: the criterion of `passed`.
        worst_index: where the actual result is not finite, else where it exceeds the tolerance most.
        spread: the errors by size and along the sequence; None unless asked for.
        distribution: divergence of the next token's probabilities, for logits; None for other outputs.
        pooled: cosines of the texts' embeddings, for hidden states; None for other outputs.
        parts_rms: of merged comparisons, `relative_rms` of each set of inputs; empty for one set.
    """

    name: str
    tolerance: Tolerance
    worst_index: tuple[int, ...]
    spread: ErrorSpread | None = None
    distribution: Distribution | None = None
    pooled: Pooled | None = None
    parts_rms: tuple[float, ...] = ()

    @property
    def typical_rms(self) -> float:
        """`relative_rms` on the median set of inputs: rounding noise is large on few of them, a fault on most."""
        return median(self.parts_rms) if self.parts_rms else self.relative_rms

    @property
    def _uses(self) -> list[Distribution | Pooled]:
        """The figures about the model's use."""
        return [part for part in (self.distribution, self.pooled) if part is not None]

    @property
    def passed(self) -> bool:
        """Whether the comparison meets the tolerance it was made with."""
        return self.judge(self.tolerance)

    def judge(self, tolerance: Tolerance) -> bool:
        """Return whether it meets another tolerance: its table, or its baseline if it has one. Needs no arrays."""
        if self.not_finite or self.expected_not_finite:
            return False
        return self._meets_table(tolerance) or self._meets_baseline(tolerance.baseline)

    def _meets_table(self, tolerance: Tolerance) -> bool:
        return (
            (tolerance.cosine is None or self.cosine >= tolerance.cosine)
            and (tolerance.relative_rms is None or self.relative_rms <= tolerance.relative_rms)
            and all(part.meets(tolerance) for part in self._uses)
            and (tolerance.atol is None or self.excess(tolerance) <= 0)
        )

    def _meets_baseline(self, baseline: Baseline | None) -> bool:
        if baseline is None:
            return False
        typical = self.relative_rms <= BASELINE_FACTOR * baseline.relative_rms
        if not typical and baseline.typical_rms is not None:
            typical = self.typical_rms <= BASELINE_FACTOR * baseline.typical_rms
            typical &= self.relative_rms <= LARGEST_FACTOR * baseline.relative_rms
        return typical and self.relative_max <= LARGEST_FACTOR * baseline.relative_max

    def nothing_proven(self, tolerance: Tolerance) -> str:
        """Return why the comparison proves nothing even if it meets this tolerance; "" if it proves something."""
        bounds = [bound for bound in (tolerance.cosine, tolerance.agreement) if bound is not None]
        bounds += (
            [] if tolerance.relative_rms is None else [1 - tolerance.relative_rms]
        )  # the relative error of zeros is 1
        return proves_nothing(self, tolerance.atol, tolerance.rtol, max(bounds, default=None))

    def excess(self, tolerance: Tolerance) -> float:
        """Return the largest `|a - e| - (atol + rtol·|e|)`; above 0 that part of the tolerance is exceeded."""
        return excess(self.frontier, tolerance.atol or 0.0, tolerance.rtol or 0.0)

    def severity(self, tolerance: Tolerance) -> tuple[bool, float]:
        """Return a sort key for comparisons, worst last: NaN or Inf, then the excess over the tolerance."""
        return self.not_finite + self.expected_not_finite > 0, self.excess(tolerance)

    def figures(self) -> dict[str, float | int | str]:
        """Return the figures for reports and the sidecar; infinity becomes a string, because JSON has none.

        `expected_not_finite` is among them only where the reference has NaN or Inf, and nothing can be equal to it.
        """
        values = {name: getattr(self, name) for name in _SHOWN}
        for part in self._uses:
            values |= part.figures()
        shown = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        bounds = {"atol": self.tolerance.atol, "rtol": self.tolerance.rtol}
        return {
            **shown,
            "not_finite": self.not_finite,
            **({"expected_not_finite": self.expected_not_finite} if self.expected_not_finite else {}),
            "worst_index": format_shape(self.worst_index),
            **{name: bound for name, bound in bounds.items() if bound is not None},
        }


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
        sequence: the axis along which errors are recorded; None records none.

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
            f"Output {name!r} cannot be compared.",
            why="The arrays are empty." if not actual.size else "The mask keeps none of its rows.",
            fix="Use longer inputs, or a mask that keeps some rows.",
        )
    spread = None if sequence is None else SpreadSums(actual.shape, sequence, tolerance)
    watch = None if spread is None else spread.add
    found = measure(actual, expected, tolerance.atol or 0.0, tolerance.rtol or 0.0, keep, watch)
    distribution = pooled = None
    if tolerance.divergence is not None:  # the figures of rounded weights
        if name == LOGITS and actual.ndim:
            distribution = compare_distributions(actual, expected, rows)
        elif name == HIDDEN_STATES and actual.ndim == 3:
            pooled = compare_pooled(actual, expected, rows)
    return Comparison(
        **vars(found),
        name=name,
        tolerance=tolerance,
        worst_index=tuple(int(i) for i in np.unravel_index(found.worst, actual.shape)),
        spread=None if spread is None else spread.result(),
        distribution=distribution,
        pooled=pooled,
    )


def largest_error(comparisons: Sequence[Comparison]) -> str:
    """Describe the largest error, and the number of NaN and Inf, which the errors do not include."""
    text = f"max error {max(comparison.max_abs for comparison in comparisons):.1e}"
    found = sum(comparison.not_finite for comparison in comparisons)
    expected = sum(comparison.expected_not_finite for comparison in comparisons)
    text += f", {found} NaN or Inf" if found else ""
    return text + (f", {expected} NaN or Inf expected" if expected else "")


def unproven_outputs(outputs: Iterable[Comparison], tolerance: Tolerance) -> tuple[bool, str]:
    """Name the outputs that are within the tolerance but for which the comparison proves nothing.

    Args:
        outputs: one comparison for each output, over all sets of inputs.
        tolerance: the criterion.

    Returns:
        Whether nothing is proven about any output, and the sentence that says so; "" where all outputs are proven.
    """
    given = list(outputs)
    if not given:
        return True, "the model has no outputs, so nothing was compared"
    found = {output.name: why for output in given if (why := output.nothing_proven(tolerance))}
    if not found:
        return False, ""
    listed = "; ".join(f"{name!r}: {why}" for name, why in list(found.items())[:3])
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return len(found) == len(given), f"the comparison proves nothing for output {listed}{more}"


def outcome_of(passed: bool, nothing: bool) -> Outcome:
    """Return the outcome of a check that compared outputs.

    Args:
        passed: every output is within the tolerance.
        nothing: that proves nothing about any output.
    """
    if not passed:
        return "failed"
    return "not proven" if nothing else "passed"


def how_to_accept(figures: Iterable[Mapping[str, float | int | str]], tolerance: Tolerance) -> str:
    """Say how a difference can be accepted, or that it cannot.

    Args:
        figures: `Comparison.figures` of what failed.
        tolerance: the criterion.
    """
    given = list(figures)
    if any(one.get("not_finite") or one.get("expected_not_finite") for one in given):
        return "No tolerance accepts NaN or infinity."
    least = tolerance.cosine
    if least is not None and any(not float(one.get("cosine", 1)) >= least for one in given):
        return f"No {argument('atol')} or {argument('rtol')} accepts a cosine below {least:g}."
    if tolerance.atol is None:
        return f"To accept this difference, give {argument('atol')}: the largest error of an element that you accept."
    return f"To accept this difference, raise {argument('atol')} or {argument('rtol')}."


def merged(comparisons: Sequence[Comparison], tolerance: Tolerance) -> Comparison:
    """Merge the comparisons of one output on several sets of inputs into one, with this tolerance.

    It has the worst index of all parts, and no spread: its parts may be of different lengths.
    """
    worst = max(comparisons, key=lambda part: part.severity(tolerance))
    totals = {name: sum(getattr(part, name) for part in comparisons) for name in _TOTALS}
    parts = [part.distribution for part in comparisons if part.distribution is not None]
    texts = [part.pooled for part in comparisons if part.pooled is not None]
    frontier: Frontier = ()
    for part in comparisons:
        sizes, errors = (np.array([pair[axis] for pair in part.frontier]) for axis in (0, 1))
        frontier = extend_frontier(frontier, sizes, errors)
    return replace(
        worst,
        **totals,
        tolerance=tolerance,
        max_abs=max(part.max_abs for part in comparisons),
        max_rel=max(part.max_rel for part in comparisons),
        expected_low=min(part.expected_low for part in comparisons),
        expected_high=max(part.expected_high for part in comparisons),
        frontier=frontier,
        spread=None,
        distribution=sum(parts[1:], parts[0]) if parts else None,
        pooled=sum(texts[1:], texts[0]) if texts else None,
        parts_rms=tuple(rms for part in comparisons for rms in (part.parts_rms or (part.relative_rms,))),
    )


def _elements_that_count(name: str, shape: tuple[int, ...], rows: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    """Widen `rows` to one flag an element, flat (a view where numpy can give one); None where all count."""
    if rows is None:
        return None
    rows = np.asarray(rows)
    if rows.dtype != np.bool_ or rows.shape != shape[: rows.ndim]:
        raise CheckFailed(
            f"The row mask of output {name!r} does not fit.",
            why=f"It is {rows.dtype} {format_shape(rows.shape)} for {format_shape(shape)}.",
            fix="Give booleans over the leading dimensions.",
        )
    if rows.all():
        return None
    widened = rows.reshape(rows.shape + (1,) * (len(shape) - rows.ndim))
    return np.broadcast_to(widened, shape).reshape(-1)
