"""Describe how the errors of one output are spread: by size, and along the sequence.

Small enough for a report, whatever the output's size: a histogram over powers of ten, and the largest error of each
of at most `MOST_POINTS` stretches of the sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

BINS_PER_DECADE = 4
MOST_POINTS = 512


@dataclass(frozen=True)
class ErrorSpread:
    """The spread of `|a - e|` over the finite elements of one output.

    Args:
        zero: elements that are exactly equal.
        first_bin: bin `k` of `counts` holds errors from `10^((first_bin + k) / BINS_PER_DECADE)` up to the next edge.
        counts: elements in each bin, from the first to the last that has any.
        positions: the first position of each stretch of the sequence, rising; empty for an output without a sequence.
        width: how many positions a stretch covers at the most.
        largest: the largest error in each stretch.
        beyond: elements of each stretch that are out of tolerance, NaN and Inf among them.
    """

    zero: int
    first_bin: int
    counts: tuple[int, ...]
    positions: tuple[int, ...] = ()
    width: int = 1
    largest: tuple[float, ...] = ()
    beyond: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Number of elements counted, including those without error."""
        return self.zero + sum(self.counts)

    def bins(self) -> Iterator[tuple[float, float, int]]:
        """Yield the edges of each bin as powers of ten, and its count: `(-6.25, -6.0, 17)`."""
        for index, count in enumerate(self.counts, self.first_bin):
            yield index / BINS_PER_DECADE, (index + 1) / BINS_PER_DECADE, count

    def decades(self) -> list[tuple[int, int]]:
        """Count the elements with an error from `10^k` to `10^(k + 1)`, as `(k, count)`, by rising k."""
        found: Counter[int] = Counter()
        for index, count in enumerate(self.counts, self.first_bin):
            found[index // BINS_PER_DECADE] += count
        return sorted(found.items())

    def merge(self, other: ErrorSpread) -> ErrorSpread:
        """Merge two spreads: counts are added, and each stretch keeps the larger error.

        Raises:
            ValueError: the two spreads belong to outputs of different lengths.
        """
        if (self.positions, self.width) != (other.positions, other.width):
            raise ValueError("The two spreads belong to outputs of different lengths.")
        sums: Counter[int] = Counter()
        for spread in (self, other):
            sums.update(dict(enumerate(spread.counts, spread.first_bin)))
        first = min(sums, default=0)
        return ErrorSpread(
            zero=self.zero + other.zero,
            first_bin=first,
            counts=tuple(sums[index] for index in range(first, max(sums, default=-1) + 1)),
            positions=self.positions,
            width=self.width,
            largest=tuple(map(max, self.largest, other.largest)),
            beyond=tuple(a + b for a, b in zip(self.beyond, other.beyond, strict=True)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the spread as JSON types; `from_dict` reads them back."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> ErrorSpread:
        """Read a spread that `to_dict` saved, also by way of JSON."""
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in saved.items()}
        return cls(**values)
