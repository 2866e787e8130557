"""Gather an `ErrorSpread` over the chunks of a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core.closeness import Floats, Places
from ...core.documents.error_spread import BINS_PER_DECADE, MOST_POINTS, ErrorSpread
from ...core.tolerance import Tolerance

# Bins from 1e-20 to 1e20; values outside are counted in the first or last bin.
_LOWEST, _HIGHEST = -20 * BINS_PER_DECADE, 20 * BINS_PER_DECADE


@dataclass(frozen=True)
class SequenceAxis:
    """The sequence axis of an output.

    Args:
        axis: of the array; negative ones count from the last.
        positions: the positions along the axis, rising; None: all, from 0 on.
    """

    axis: int
    positions: NDArray[np.int64] | None = None


class SpreadSums:
    """Running counts and maxima of errors.

    Args:
        shape: of the output.
        sequence: where the sequence is.
        tolerance: what the errors are held against.
    """

    def __init__(self, shape: tuple[int, ...], sequence: SequenceAxis, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._zero = 0
        self._counts = np.zeros(_HIGHEST - _LOWEST + 1, dtype=np.int64)
        axis = sequence.axis % len(shape)
        self._length = shape[axis]
        self._inner = math.prod(shape[axis + 1 :])
        positions = np.arange(self._length) if sequence.positions is None else sequence.positions
        self._width = math.ceil(self._length / MOST_POINTS)
        stretches = math.ceil(self._length / self._width)
        self._positions = positions[:: self._width]
        self._largest = np.zeros(stretches)
        self._beyond = np.zeros(stretches, dtype=np.int64)

    def add(self, where: Places, size: Floats, error: Floats | None) -> None:
        """Add the errors of some elements.

        Args:
            where: their flat positions.
            size: magnitudes of the expected values.
            error: all finite; None where the result is NaN or Inf, which is out of tolerance.
        """
        stretch = where // self._inner % self._length // self._width
        if error is None:
            self._beyond += np.bincount(stretch, minlength=self._beyond.size)
            return
        some = error[error > 0]
        self._zero += error.size - some.size
        bins = np.floor(np.log10(some) * BINS_PER_DECADE).clip(_LOWEST, _HIGHEST).astype(np.int64) - _LOWEST
        self._counts += np.bincount(bins, minlength=self._counts.size)
        np.maximum.at(self._largest, stretch, error)
        beyond = (error > self._tolerance.allowed(size)) & (self._tolerance.atol is not None)
        self._beyond += np.bincount(stretch[beyond], minlength=self._beyond.size)

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
