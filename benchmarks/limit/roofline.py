"""The limit of a call: the larger of the times its multiply-adds and one pass over its tensors take at the least.

Both rates are measured on the threads of the candidates and between them (`clock.interleave`), with the instruction
set that the compiled kernels use: what a processor does depends on its clock, which depends on what else it does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..clock import Run, Timing
from .program import Program, program

# What a result holds figures against, as figures and pages call it; earlier ones were held against the square product.
LIMIT, OLD_LIMIT = "the limit", "a square product of torch"
# Names among interleaved candidates.
PEAK, PASS, SQUARE = "peak", "pass", "square"
# A call of the loops takes so long, about: starting threads is little beside it.
_SECONDS = 0.02
_SIDE = 2048
_TENSORS = 4


@dataclass(frozen=True)
class Roofline:
    """What was measured of the processor beside a case.

    Args:
        peak: multiplications and additions a second, counted apart.
        pass_seconds: of reading three tensors of the case and writing one.
        bytes: of the four tensors.
        square: operations a second of a large square product of torch, for comparison only.
    """

    peak: float
    pass_seconds: float
    bytes: int
    square: float

    def limit(self, operations: float) -> float:
        """Seconds that a call with so many operations takes at the least."""
        return max(operations / self.peak, self.pass_seconds)

    def to_dict(self, operations: float) -> dict[str, Any]:
        """As it is stored with a case."""
        compute = operations / self.peak
        return {
            "limit_ms": round(1e3 * self.limit(operations), 3),
            "bound": "multiply-adds" if compute >= self.pass_seconds else "copy",
            "compute_ms": round(1e3 * compute, 3),
            "copy_ms": round(1e3 * self.pass_seconds, 3),
            "peak_gflops": round(self.peak / 1e9, 1),
            "copy_gb_s": round(self.bytes / self.pass_seconds / 1e9, 1),
            "square_gflops": round(self.square / 1e9, 1),
        }


def name_of_limit(row: Mapping[str, Any]) -> str:
    """What the `limit_ms` of a stored case is."""
    return LIMIT if "peak_gflops" in row else OLD_LIMIT


class Loops:
    """The loops of one case, made ready to be interleaved with its candidates.

    Args:
        elements: of one tensor of the case.
        width: bytes of an element.
        threads: as many as the candidates have.
    """

    def __init__(self, elements: int, width: int, threads: int) -> None:
        loops = program()
        floats = elements * width // 4
        self.bytes = _TENSORS * floats * 4
        # Written, because pages of zeros that nobody wrote are all the same page, which the cache holds.
        arrays = [np.ones(floats, np.float32) for _ in range(_TENSORS)]
        square = torch.rand(_SIDE, _SIDE)
        self._rounds, self._operations = _calibrate_peak(loops, threads)
        self._times = _calibrate_pass(loops, arrays, threads)
        self.ready: dict[str, Callable[[], Run]] = {
            PEAK: lambda: partial(loops.multiply_add, self._rounds, threads),
            PASS: lambda: partial(loops.pass_over, arrays, self._times, threads),
            SQUARE: lambda: lambda: square @ square,
        }

    def roofline(self, timings: dict[str, Timing]) -> Roofline:
        """What the medians of `ready` say."""
        return Roofline(
            peak=self._operations / timings[PEAK].median,
            pass_seconds=timings[PASS].median / self._times,
            bytes=self.bytes,
            square=2 * _SIDE**3 / timings[SQUARE].median,
        )


def _calibrate_peak(loops: Program, threads: int) -> tuple[int, float]:
    """Rounds of one call, and its operations."""
    rounds = 100_000
    rounds = _enough(lambda: loops.multiply_add(rounds, threads)) * rounds
    return rounds, loops.multiply_add(rounds, threads)


def _calibrate_pass(loops: Program, arrays: list[Any], threads: int) -> int:
    """Passes of one call."""
    return _enough(lambda: loops.pass_over(arrays, 1, threads))


def _enough(run: Run) -> int:
    """How many calls take `_SECONDS`."""
    best = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return math.ceil(_SECONDS / best)
