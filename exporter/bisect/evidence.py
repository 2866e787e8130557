"""Collect the evidence at the first wrong value of a file, for the rules of `causes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.geometry import WindowGeometry
from ...core.tolerance import Tolerance
from ...runtime.parity.compare import compare
from ...runtime.parity.comparison import Comparison
from ...runtime.parity.runner import Runner
from .boundaries import Boundary
from .reference import AttentionCall, Floats

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Measured(Boundary):
    """One boundary of the file compared with the reference.

    Args:
        actual: the file's value.
        comparison: the comparison by the file's tolerance, whose absolute part is in units of the reference's root mean
            square, because intermediate values may be of any size.
    """

    actual: NDArray[Any]
    comparison: Comparison

    @property
    def passed(self) -> bool:
        """Whether the value is within the tolerance."""
        return self.comparison.passed

    def to_dict(self) -> dict[str, Any]:
        """Describe it in JSON types."""
        named = {"module": self.path, "role": self.role, "value": self.value}
        return {**named, "passed": self.passed, **self.comparison.figures()}


class Recorded(Runner):
    """A runner that returns the recorded outputs of a finished run.

    Args:
        name: what ran.
        outputs: what it returned, by name.
    """

    def __init__(self, name: str, outputs: Arrays) -> None:
        self.name, self.outputs, self._recorded = name, list(outputs), dict(outputs)

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Return the recorded outputs."""
        return self._recorded


def measure(candidate: Runner, boundaries: Sequence[Boundary], inputs: Arrays, tolerance: Tolerance) -> list[Measured]:
    """Compare a file's values at boundaries with the modules' values.

    Args:
        candidate: the file; it returns the values of these boundaries by name.
        boundaries: the boundaries, with the modules' values on these inputs.
        inputs: the candidate's inputs.
        tolerance: the tolerance; its absolute part is in units of each value's root mean square.
    """

    def scaled(expected: Floats) -> Tolerance:
        size = float(np.sqrt(np.mean(np.square(expected)))) or 1.0
        return tolerance.scaled(size)

    reference = Recorded("the model in float64", {boundary.value: boundary.expected for boundary in boundaries})
    found = compare(candidate, reference, dict(inputs), scaled)
    return [
        Measured(
            value=boundary.value,
            order=boundary.order,
            path=boundary.path,
            role=boundary.role,
            expected=boundary.expected,
            actual=found.outputs[boundary.value],
            comparison=comparison,
        )
        for boundary, comparison in zip(boundaries, found.comparisons, strict=True)
    ]


@dataclass(frozen=True)
class Evidence:
    """The first boundary out of tolerance, with the evidence around it.

    Args:
        fault: that boundary.
        dtype: element type of the file.
        tolerance: the tolerance that boundaries are compared with.
        inputs: the inputs the file was run on.
        geometry: the window of its attention; None if it has none.
        length: tokens per sequence.
        call: the attention call of the fault's module, if it has one, as the reference made it.
        attributes: attributes of that call's node.
        weights: the module's own tensors in the file and in the checkpoint, in matching pairs.
        rerun: the fault's boundary measured again on other inputs.
    """

    fault: Measured
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
        """The axis of the fault's array that counts positions."""
        if self.fault.role in ("query", "key", "value", "attention"):
            return 1 if list(self.attributes["perm"]) == [0, 2, 1, 3] else 2
        shape = self.fault.expected.shape
        return next((axis for axis, size in enumerate(shape) if axis and size == self.length), 1)

    def errors(self) -> Floats:
        """Return the largest error at each position; not finite counts as inf."""
        actual = self.fault.actual.astype(np.float64)
        error = np.where(np.isfinite(actual), np.abs(actual - self.fault.expected), np.inf)
        largest: Floats = np.moveaxis(error, self.sequence_axis, 0).reshape(error.shape[self.sequence_axis], -1).max(1)
        return largest

    def wrong_positions(self) -> NDArray[np.int64]:
        """Return the positions with an element out of tolerance."""
        actual = self.fault.actual.astype(np.float64)
        expected, tolerance = self.fault.expected, self.fault.comparison.tolerance
        with np.errstate(invalid="ignore"):
            wrong = ~(np.abs(actual - expected) <= tolerance.allowed(np.abs(expected)))
        others = tuple(axis for axis in range(wrong.ndim) if axis != self.sequence_axis)
        return np.flatnonzero(wrong.any(axis=others))
