"""Time and memory of the WindowedAttention node against what users have without it.

Batch 1, 8 heads of 64, window 256, causal exact, fp32, two threads, inputs `[B, H, N, D]`. All outputs
are compared before anything is timed. The limit is `4·b·h·n·d·K` operations, `K` the mean number of
visible keys, at the rate of a large square matrix product, measured between the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from .candidates import CANDIDATES, GEOMETRY, HEAD_DIM, HEADS, THREADS, random_inputs
from .clock import interleave
from .memory import MIB, in_child, leave_some_memory
from .target import Target

LENGTHS = (1024, 2048, 4096, 8192, 16384)
MEMORY_CEILING = 8 << 30
# Two fp32 softmaxes over the same keys, summed in another order.
AGREEMENT = 2e-5
_SQUARE = 2048
_SAMPLES, _LEAST_SAMPLES = 15, 7


def measure(lengths: Sequence[int], seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark as it is stored.

    Args:
        lengths: sequence lengths.
        seconds: how long to wait for calm samples at each length.
        tell: told each step.
    """
    leave_some_memory()
    peaks = _measure_memory(lengths, tell)
    sizes = []
    for length in lengths:
        tell(f"Timing, n = {length}")
        sizes.append(_measure_length(length, seconds, peaks[length]))
    return {
        "setting": {
            "batch": 1,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            **asdict(GEOMETRY),
            "dtype": "fp32",
            "threads": THREADS,
            "layout": "heads first",
        },
        "labels": {name: candidate.label for name, candidate in CANDIDATES.items()},
        "sizes": sizes,
        "targets": [target.to_dict() for target in _targets(sizes)],
    }


def _measure_memory(lengths: Sequence[int], tell: Callable[[str], None]) -> dict[int, dict[str, Any]]:
    """Peak of every candidate's first runs at every length, each in a fresh process.

    A dense candidate is left out where four times its peak at half the length is over the ceiling.
    """
    peaks: dict[int, dict[str, Any]] = {length: {} for length in lengths}
    for name, candidate in CANDIDATES.items():
        known: tuple[int, int] | None = None
        for length in sorted(lengths):
            tell(f"Memory, n = {length}: {candidate.label}")
            expected = known[1] * (length / known[0]) ** 2 if candidate.dense and known else 0
            if expected > MEMORY_CEILING:
                peaks[length][name] = {"skipped": f"would need about {expected / 2**30:.0f} GiB"}
                continue
            peak = in_child("node", name, str(length))["peak_bytes"]
            known = (length, peak)
            peaks[length][name] = {"peak_mib": round(peak / MIB, 1)}
    return peaks


def _measure_length(length: int, seconds: float, memory: dict[str, Any]) -> dict[str, Any]:
    inputs = random_inputs(length)
    prepare: dict[str, Callable[[], Callable[[], Any]]] = {
        name: partial(CANDIDATES[name].prepare, inputs) for name, entry in memory.items() if "skipped" not in entry
    }
    difference = _agreement({name: ready()() for name, ready in prepare.items()})
    square = torch.rand(_SQUARE, _SQUARE)
    measured = interleave(
        {**prepare, "square": lambda: lambda: square @ square},
        samples=_SAMPLES,
        least=_LEAST_SAMPLES,
        seconds=seconds,
        fresh=sum(entry.get("peak_mib", 0) for entry in memory.values()) * MIB > MEMORY_CEILING / 2,
    )
    rate = 2 * _SQUARE**3 / measured.timings["square"].median
    keys = GEOMETRY.mean_visible_keys(length)
    limit = 4 * HEADS * length * HEAD_DIM * keys / rate
    candidates = {
        name: entry
        | (measured.timings[name].in_milliseconds() | {"max_difference": difference[name]} if name in prepare else {})
        for name, entry in memory.items()
    }
    return {
        "length": length,
        "mean_visible_keys": round(keys, 2),
        "matmul_gflops": round(rate / 1e9, 1),
        "limit_ms": round(1e3 * limit, 3),
        "samples": measured.samples,
        "others_cpu": None if math.isnan(measured.others) else round(measured.others, 3),
        "candidates": candidates,
    }


def _agreement(outputs: dict[str, Any]) -> dict[str, float]:
    """The largest difference of each output from any other.

    Raises:
        AssertionError: two candidates do not compute the same.
    """
    found = {
        name: max(float(np.abs(output - other).max()) for other in outputs.values()) for name, output in outputs.items()
    }
    for name, value in found.items():
        assert value <= AGREEMENT, f"{name} differs by {value} from another candidate"
    return {name: float(f"{value:.2g}") for name, value in found.items()}


def ratio(size: dict[str, Any], name: str, to: str) -> float:
    """The median time of one candidate over another's; NaN where one was not measured."""
    first, second = (size["candidates"][key].get("median_ms", math.nan) for key in (name, to))
    return float(first / second)


def _slope(sizes: Sequence[dict[str, Any]], figure: str) -> float:
    """Exponent of the node's growth with the length, fitted over all lengths."""
    lengths = np.log([size["length"] for size in sizes])
    values = np.log([size["candidates"]["node"][figure] for size in sizes])
    return float(np.polyfit(lengths, values, 1)[0])


def _targets(sizes: Sequence[dict[str, Any]]) -> list[Target]:
    targets = []
    for size in sizes:
        if size["length"] == 4096:
            for dense in ("dense_where", "dense"):
                what = f"time at n=4096, node / {CANDIDATES[dense].label}"
                targets.append(Target(what, ratio(size, "node", dense), 1 / 15))
            targets.append(Target("time at n=4096, node / upstream", ratio(size, "node", "upstream"), 1 / 3))
    if len(sizes) > 1:
        targets.append(Target("growth of the node's time, exponent of n", _slope(sizes, "median_ms"), 1.1))
        targets.append(Target("growth of the node's memory, exponent of n", _slope(sizes, "peak_mib"), 1.1))
    return targets
