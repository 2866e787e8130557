"""What is known at the first place where a file is wrong: the material every rule of `causes` looks at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.geometry import WindowGeometry
from ...core.tolerance import Tolerance
from ...runtime.parity.comparison import Comparison, compare_arrays
from .boundaries import Boundary
from .reference import AttentionCall, Floats

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Measured:
    """One boundary of the file beside the reference.

    Args:
        boundary: which one.
        actual: what the file has there.
        comparison: judged by the file's tolerance, its absolute part in units of the reference's root mean square,
            since values on the way may be of any size.
    """

    boundary: Boundary
    actual: NDArray[Any]
    comparison: Comparison

    @property
    def passed(self) -> bool:
        """Whether it is within the tolerance."""
        return self.comparison.passed


def measure(boundary: Boundary, actual: NDArray[Any], tolerance: Tolerance) -> Measured:
    """Compare one boundary."""
    size = float(np.sqrt(np.mean(np.square(boundary.expected)))) or 1.0
    scaled = Tolerance(tolerance.atol * size, tolerance.rtol, tolerance.cosine)
    return Measured(boundary, actual, compare_arrays(boundary.label, actual, boundary.expected, scaled))


@dataclass(frozen=True)
class Evidence:
    """The first boundary out of tolerance and what surrounds it.

    Args:
        fault: that boundary.
        module: the module held responsible.
        dtype: element type of the file.
        tolerance: what boundaries are judged by.
        inputs: what the file was run on.
        geometry: the window of its attention; None without one.
        length: tokens a sequence.
        call: the attention call of the fault's module, if it has one, as the reference made it.
        attributes: attributes of that call's node.
        weights: the module's own tensors in the file and in the checkpoint, in matching pairs.
        rerun: the fault's boundary measured again on other inputs.
    """

    fault: Measured
    module: str
    dtype: str
    tolerance: Tolerance
    inputs: Arrays
    geometry: WindowGeometry | None
    length: int
    call: AttentionCall | None
    attributes: Mapping[str, Any]
    weights: list[tuple[str, Floats, Floats]]
    rerun: Callable[[Arrays], Measured]

    @property
    def sequence_axis(self) -> int:
        """Which axis of the fault's array counts positions."""
        is_attention = self.fault.boundary.role in ("query", "key", "value", "attention")
        if is_attention:
            return 1 if list(self.attributes["perm"]) == [0, 2, 1, 3] else 2
        shape = self.fault.boundary.expected.shape
        return next((axis for axis, size in enumerate(shape) if axis and size == self.length), 1)

    def by_position(self) -> tuple[Floats, Floats]:
        """Largest error and largest expected magnitude at each position; what is not finite counts as inf."""
        actual = self.fault.actual.astype(np.float64)
        expected = self.fault.boundary.expected
        error = np.where(np.isfinite(actual), np.abs(actual - expected), np.inf)
        others = tuple(axis for axis in range(error.ndim) if axis != self.sequence_axis)
        return error.max(axis=others), np.abs(expected).max(axis=others)

    def wrong_positions(self) -> NDArray[np.int64]:
        """Positions with an element out of tolerance."""
        actual = self.fault.actual.astype(np.float64)
        expected = self.fault.boundary.expected
        tolerance = self.fault.comparison.tolerance
        with np.errstate(invalid="ignore"):
            wrong = ~(np.abs(actual - expected) <= tolerance.atol + tolerance.rtol * np.abs(expected))
        others = tuple(axis for axis in range(wrong.ndim) if axis != self.sequence_axis)
        return np.flatnonzero(wrong.any(axis=others))
