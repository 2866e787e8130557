"""Gather an `ErrorSpread` over the chunks of a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.documents.error_spread import BINS_PER_DECADE, MOST_POINTS, ErrorSpread

# Bins from 1e-20 to 1e20; values outside are counted in the first or last bin.
_LOWEST, _HIGHEST = -20 * BINS_PER_DECADE, 20 * BINS_PER_DECADE


@dataclass(frozen=True)
class SequenceAxis:
    """The sequence axis of an output.

    Args:
        axis: of the array; negative ones count from the last.
        positions: which positions of the sequence lie along it, rising; None: all, from 0 on.
    """

    axis: int
    positions: NDArray[np.int64] | None = None


class SpreadSums:
    """Running counts and maxima of errors.

    Args:
        shape: of the output.
        sequence: where the sequence is; None gathers the histogram only.
    """

    def __init__(self, shape: tuple[int, ...], sequence: SequenceAxis | None) -> None:
        self._zero = 0
        self._counts = np.zeros(_HIGHEST - _LOWEST + 1, dtype=np.int64)
        axis = 0 if sequence is None else sequence.axis % len(shape)
        length = 0 if sequence is None else shape[axis]
        self._inner = math.prod(shape[axis + 1 :])
        self._length = length
        positions = np.arange(length) if sequence is None or sequence.positions is None else sequence.positions
        self._width = max(1, math.ceil(length / MOST_POINTS))
        stretches = math.ceil(length / self._width)
        self._positions = positions[:: self._width]
        self._largest = np.zeros(stretches)
        self._beyond = np.zeros(stretches, dtype=np.int64)

    def add(self, where: NDArray[np.intp], error: NDArray[np.float64], beyond: NDArray[np.bool_]) -> None:
        """Add finite errors at these flat positions, and which of them are out of tolerance."""
        some = error[error > 0]
        self._zero += error.size - some.size
        bins = np.floor(np.log10(some) * BINS_PER_DECADE).clip(_LOWEST, _HIGHEST).astype(np.int64) - _LOWEST
        self._counts += np.bincount(bins, minlength=self._counts.size)
        if self._length:
            np.maximum.at(self._largest, self._stretch(where), error)
            self._count_beyond(where[beyond])

    def add_not_finite(self, where: NDArray[np.intp]) -> None:
        """Add flat positions at which the result is NaN or Inf."""
        if self._length:
            self._count_beyond(where)

    def result(self) -> ErrorSpread:
        """Return the counts and maxima gathered so far."""
        used = np.flatnonzero(self._counts)
        first, end = (int(used[0]), int(used[-1]) + 1) if used.size else (-_LOWEST, -_LOWEST)
        return ErrorSpread(
            zero=self._zero,
            first_bin=first + _LOWEST,
            counts=tuple(self._counts[first:end].tolist()),
            positions=tuple(self._positions.tolist()),
            width=self._width,
            largest=tuple(self._largest.tolist()),
            beyond=tuple(self._beyond.tolist()),
        )

    def _stretch(self, where: NDArray[np.intp]) -> NDArray[Any]:
        return where // self._inner % self._length // self._width

    def _count_beyond(self, where: NDArray[np.intp]) -> None:
        self._beyond += np.bincount(self._stretch(where), minlength=self._beyond.size)
