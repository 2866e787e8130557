"""Measure the error that an unmodified module itself makes in half precision, as a baseline for the file's error.

The module runs twice. The fp32 run shows the positions at which it computes what the reference does; where it departs
(docs/numerics.md lists how) its outputs are no measure of rounding. The half-precision run shows its error there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.tolerance import BASELINE_FACTOR, LARGEST_FACTOR, Baseline, Tolerance, tolerance_for
from ..session import Arrays
from .comparison import Comparison, compare_arrays, merged
from .runner import Runner, take_sample

# A module that differs from the reference at a larger share of positions is not used as a baseline.
_MOST_DEPARTING = 0.5
# Elements compared at a time, and at least a position.
_CHUNK = 1 << 18


class UntouchedModule(NamedTuple):
    """An unmodified module, ready to run on the inputs of its file.

    Args:
        exact: in fp32.
        rounded: in the file's element type.
        source: its description in words.
    """

    exact: Runner
    rounded: Runner
    source: str


class BaselineMeter:
    """Measure the error of an unmodified module over sets of inputs.

    Args:
        module: the module; its error as it was measured before; or a text that says why neither is there.
        dtype: "fp16" or "bf16"; an error that was measured in another type is not used.

    Attributes:
        known: the error that was measured before; None if the module is measured.
        why_none: why there is no baseline; "" as long as there is one.
    """

    def __init__(self, module: UntouchedModule | Baseline | str, dtype: str) -> None:
        self.known = module if isinstance(module, Baseline) and module.dtype == dtype else None
        self.why_none = module if isinstance(module, str) else ""
        if isinstance(module, Baseline) and module.dtype != dtype:
            self.why_none = f"the untouched module's own error is known in {module.dtype}, but not in {dtype}"
        self._module, self._dtype, self._table = module, dtype, tolerance_for(dtype)
        self._found: list[Comparison] = []
        self._positions = self._departing = 0

    @property
    def measures(self) -> bool:
        """Whether there is a module to run that was usable so far."""
        return isinstance(self._module, UntouchedModule) and not self.why_none

    def take(self, reference: Runner, inputs: Arrays, expected: Arrays) -> None:
        """Run the module on inputs for which the reference gave these outputs.

        An error raised by the module ends the measurement, but not the comparison of the file.
        """
        if not isinstance(self._module, UntouchedModule) or self.why_none:
            return
        sample, same = reference.sample(inputs), dict[str, NDArray[np.bool_]]()
        try:  # one after the other: logits of a large vocabulary are large
            exact = self._module.exact.run(inputs)
            for name in (name for name in expected if name in exact):  # a module may return only its first output
                counted = reference.counted(inputs, expected[name].shape)
                same[name], positions = _alike(take_sample(exact[name], sample), expected[name], counted)
                self._positions += positions
                self._departing += positions - int(same[name].sum())
            del exact
            rounded = self._module.rounded.run(inputs)
        except Exception as error:  # PyTorch lacks an operator in this type, or runs out of memory
            first = (str(error).strip().splitlines() or [""])[0][:200]
            self.why_none = f"{self._module.source} does not run here ({type(error).__name__}: {first})"
            return
        for name, rows in same.items():
            if rows.any():
                sampled = take_sample(rounded[name], sample)
                self._found.append(compare_arrays(name, sampled, expected[name], self._table, rows=rows))

    def result(self) -> Baseline | None:
        """Return the error over all inputs so far; None if there is no usable one, as `why_none` explains."""
        if not isinstance(self._module, UntouchedModule) or self.why_none:
            return self.known
        source = self._module.source
        if not self._found or self._departing > _MOST_DEPARTING * self._positions:
            share = self._departing / max(1, self._positions)
            self.why_none = f"{source} differs in fp32 at {share:.0%} of positions"
            return None
        whole = merged(self._found, self._table)
        if whole.not_finite or (self._table.cosine is not None and whole.cosine < self._table.cosine):
            self.why_none = f"{source} is too inaccurate in that precision (cosine {whole.cosine:.4g})"
            return None
        return Baseline(self._dtype, whole.relative_rms, whole.relative_max, source)


def _alike(
    actual: NDArray[Any], expected: NDArray[Any], counted: NDArray[np.bool_] | None
) -> tuple[NDArray[np.bool_], int]:
    """Return at which of the counted positions the module computes in fp32 what the reference does, and their number.

    The axes that count positions are those of `counted`, which are all where a position has a single score.
    """
    axes = expected.ndim - 1 if counted is None else counted.ndim
    same = _equal_positions(actual, expected, tolerance_for("fp32"), axes)
    return (same, same.size) if counted is None else (same & counted, int(counted.sum()))


def _equal_positions(
    actual: NDArray[Any], expected: NDArray[Any], tolerance: Tolerance, axes: int
) -> NDArray[np.bool_]:
    """Return at which positions all elements are within a tolerance; positions are the first `axes` axes."""
    rows, width = math.prod(expected.shape[:axes]), math.prod(expected.shape[axes:])
    a, e = actual.reshape(rows, width), expected.reshape(rows, width)
    same, step = np.zeros(rows, np.bool_), max(1, _CHUNK // max(1, width))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        with np.errstate(invalid="ignore"):
            off = np.abs(a[part] - e[part])
        same[part] = (off <= tolerance.allowed(np.abs(e[part]))).all(1)
    return same.reshape(expected.shape[:axes])


def with_baseline(tolerance: Tolerance, baseline: Baseline | None) -> Tolerance:
    """Return the tolerance with the baseline added, if the tolerance uses one."""
    return replace(tolerance, baseline=baseline) if tolerance.takes_baseline else tolerance


def both_errors(comparison: Comparison, baseline: Baseline) -> str:
    """Describe in words a file's error over all inputs and the unmodified module's."""
    parts = []
    for what, own, modules, factor in (
        ("rms", comparison.relative_rms, baseline.relative_rms, BASELINE_FACTOR),
        ("largest", comparison.relative_max, baseline.relative_max, LARGEST_FACTOR),
    ):
        times = f"{own / modules:.2f} times it, " if modules else ""
        parts.append(f"{what} {own:.2g} and {modules:.2g} ({times}at most {factor:g})")
    return f"its error and that of {baseline.source}, relative to the outputs' rms: {', '.join(parts)}"


def table_alone(why_none: str) -> str:
    """State that no baseline was measured, and why."""
    return f"the error is judged by the table of tolerances only: {why_none}"
