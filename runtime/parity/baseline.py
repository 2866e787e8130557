"""Measure the error that an unmodified module itself makes in a precision, as a baseline for the file's error.

The module runs twice. The fp32 run shows the positions at which it computes what the reference does; where it departs
(docs/numerics.md lists how) its outputs are no measure of rounding. The run in the file's precision shows its error
there. In fp32 one run is both, and it is made only where a file misses the table of tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.tolerance import BASELINE_FACTOR, LARGEST_FACTOR, Baseline, Tolerance, tolerance_for
from ..session import Arrays
from .comparison import Comparison, compare_arrays, merged
from .runner import Runner

# A module that differs from the reference at a larger share of positions is not used as a baseline.
_MOST_DEPARTING = 0.5
# Elements compared at a time, and at least a position.
_CHUNK = 1 << 18
# A position whose relative error in fp32 is at most this one differs from the reference by rounding alone: the largest
# error of a trained Gemma 3 on text is 3.5e-5 of its logits' root mean square.
_ALIKE = 1e-4


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


# What is known of an unmodified module: the module, its error as it was measured before, or why there is neither.
Known = UntouchedModule | Baseline | str


class BaselineMeter:
    """Measure the error of an unmodified module over sets of inputs.

    Args:
        module: what is known of the module, or a function that returns it, which is called when it is first needed.
        dtype: "fp32", "fp16" or "bf16"; an error that was measured in another type is not used. In fp32 nothing is
            measured before a file misses the table.

    Attributes:
        known: the error that was measured before; None if the module is measured.
        why_none: why there is no baseline; "" as long as there is one.
    """

    def __init__(self, module: Known | Callable[[], Known], dtype: str) -> None:
        self.known: Baseline | None = None
        self.why_none = ""
        self._given, self._dtype, self._table = module, dtype, tolerance_for(dtype)
        self._module: Known | None = None
        self._found: list[Comparison] = []
        self._positions = self._departing = 0
        # Inputs on which the file met the table so far; None once the module is measured.
        self._waiting: list[Arrays] | None = [] if dtype == "fp32" else None
        if self._waiting is None:
            self._open()

    def _open(self) -> None:
        """Take what is known of the module."""
        self._module = module = self._given() if callable(self._given) else self._given
        if isinstance(module, str):
            self.why_none = module
        elif isinstance(module, Baseline):
            self.known = module if module.dtype == self._dtype else None
            if self.known is None:
                self.why_none = f"the untouched module's own error is known in {module.dtype}, but not in {self._dtype}"

    @property
    def measures(self) -> bool:
        """Whether there is a module to run that was usable so far, and a reason to run it."""
        return isinstance(self._module, UntouchedModule) and not self.why_none

    def take(self, reference: Runner, inputs: Arrays, expected: Arrays, *, missed: bool = True) -> None:
        """Run the module on inputs for which the reference gave these outputs.

        An error raised by the module ends the measurement, but not the comparison of the file.

        Args:
            reference: computed the outputs.
            inputs: of both.
            expected: the outputs.
            missed: whether the file misses the table on these inputs; until it does, nothing is measured in fp32.
        """
        if self._waiting is not None:
            if not missed:
                self._waiting.append(inputs)
                return
            waiting, self._waiting = self._waiting, None
            self._open()
            for earlier in waiting if self.measures else ():
                self._measure(reference, earlier, reference.run(earlier))
        if self.measures:
            self._measure(reference, inputs, expected)

    def _measure(self, reference: Runner, inputs: Arrays, expected: Arrays) -> None:
        module = self._module
        assert isinstance(module, UntouchedModule)
        sample, same = reference.sample(inputs), dict[str, NDArray[np.bool_]]()
        try:  # one after the other: logits of a large vocabulary are large
            exact = module.exact.run_sampled(inputs, sample)
            for name in (name for name in expected if name in exact):  # a module may return only its first output
                counted = reference.counted(inputs, expected[name].shape)
                same[name], positions = _alike(exact[name], expected[name], counted)
                self._positions += positions
                self._departing += positions - int(same[name].sum())
            if module.rounded is module.exact:
                rounded = exact
            else:
                del exact
                rounded = module.rounded.run_sampled(inputs, sample)
        except Exception as error:  # PyTorch lacks an operator in this type, or runs out of memory
            first = (str(error).strip().splitlines() or [""])[0][:200]
            self.why_none = f"{module.source} does not run here ({type(error).__name__}: {first})"
            return
        for name, rows in same.items():
            if rows.any():
                self._found.append(compare_arrays(name, rounded[name], expected[name], self._table, rows=rows))

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
        return Baseline(self._dtype, whole.relative_rms, whole.relative_max, source, whole.typical_rms)


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
    """Return at which positions all elements are within a tolerance, or the whole position within `_ALIKE`.

    Positions are the first `axes` axes.
    """
    rows, width = math.prod(expected.shape[:axes]), math.prod(expected.shape[axes:])
    a, e = actual.reshape(rows, width), expected.reshape(rows, width)
    same, step = np.zeros(rows, np.bool_), max(1, _CHUNK // max(1, width))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        with np.errstate(invalid="ignore"):
            off = np.abs(a[part] - e[part])
            alike = np.square(off).sum(1) <= _ALIKE**2 * np.square(e[part]).sum(1)
        same[part] = (off <= tolerance.allowed(np.abs(e[part]))).all(1) | alike
    return same.reshape(expected.shape[:axes])


def with_baseline(tolerance: Tolerance, baseline: Baseline | None) -> Tolerance:
    """Return the tolerance with the baseline added, if there is one."""
    return tolerance if baseline is None else replace(tolerance, baseline=baseline)


def both_errors(comparison: Comparison, baseline: Baseline) -> str:
    """Describe in words a file's error over all inputs and the unmodified module's."""
    parts = []
    several = comparison.relative_rms > BASELINE_FACTOR * baseline.relative_rms and baseline.typical_rms is not None
    most = LARGEST_FACTOR if several else BASELINE_FACTOR
    for what, own, modules, factor in (
        *(
            [("rms on the median input", comparison.typical_rms, baseline.typical_rms or 0.0, BASELINE_FACTOR)]
            * several
        ),
        ("rms", comparison.relative_rms, baseline.relative_rms, most),
        ("largest", comparison.relative_max, baseline.relative_max, LARGEST_FACTOR),
    ):
        times = f"{own / modules:.2f} times it, " if modules else ""
        parts.append(f"{what} {own:.2g} and {modules:.2g} ({times}at most {factor:g})")
    of = "error of the file and of" if baseline.dtype != "fp32" else "rounding error of the file and of"
    return f"{of} {baseline.source}, relative to the outputs' rms: {', '.join(parts)}"


def table_alone(why_none: str) -> str:
    """State that no baseline was measured, and why."""
    return f"the error is judged by the table of tolerances only: {why_none}"
