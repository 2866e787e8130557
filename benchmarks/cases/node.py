"""Time and memory of the WindowedAttention node against what users have without it.

Batch 1, 8 heads of 64, window 256, causal exact, fp32, two threads, inputs `[B, H, N, D]`. All outputs
are compared before anything is timed. The limit is `4·b·h·n·d·K` operations, `K` the mean number of
visible keys, at the processor's own rate of multiply-adds, or one pass over the tensors where that takes
longer (`limit/`); both are measured between the candidates, and a square product of torch beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ..candidates import CANDIDATES, GEOMETRY, HEAD_DIM, HEADS, THREADS, random_inputs
from ..clock import interleave
from ..limit.program import instruction_set
from ..limit.roofline import PEAK, Loops
from ..target import Target
from .memory import MIB, in_child, leave_some_memory

LENGTHS = (1024, 2048, 4096, 8192, 16384)
MEMORY_CEILING = 8 << 30
OURS = ("node", "kernel")
# Two fp32 softmaxes over the same keys, summed in another order.
AGREEMENT = 2e-5
_SAMPLES, _LEAST_SAMPLES = 15, 7
# The most memory of a call of the compiled kernel, inputs and outputs counted, over these.
MEMORY_OF_KERNEL = 1.5
# The most time at n = 4096 over that of others.
AT_4096 = {"dense_where": 1 / 15, "dense": 1 / 15, "upstream": 1 / 3}


def measure(lengths: Sequence[int], seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark as it is stored.

    Args:
        lengths: sequence lengths.
        seconds: how long each length takes at most, about; it is shared out among the candidates.
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
            "instruction_set": instruction_set(),
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
            if (reason := candidate.why_not()) is not None:
                peaks[length][name] = {"skipped": reason}
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
    loops = Loops(HEADS * length * HEAD_DIM, 4, THREADS)
    measured = interleave(
        {**prepare, **loops.ready},
        samples=_SAMPLES,
        least=_LEAST_SAMPLES,
        seconds=seconds,
        most=seconds / (len(loops.ready) + len(prepare)),
        fresh=sum(entry.get("peak_mib", 0) for entry in memory.values()) * MIB > MEMORY_CEILING / 2,
    )
    keys = GEOMETRY.mean_visible_keys(length)
    operations = 4 * HEADS * length * HEAD_DIM * keys
    candidates = {
        name: entry
        | (
            measured.timings[name].in_milliseconds()
            | {"samples": measured.counts[name], "max_difference": difference[name]}
            if name in prepare
            else {}
        )
        for name, entry in memory.items()
    }
    return {
        "length": length,
        "mean_visible_keys": round(keys, 2),
        **loops.roofline(measured.timings).to_dict(operations),
        "samples": measured.counts[PEAK],
        "inputs_outputs_mib": round(4 * 4 * HEADS * length * HEAD_DIM / MIB, 1),
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
    first, second = (size["candidates"].get(key, {}).get("median_ms", math.nan) for key in (name, to))
    return float(first / second)


def _slope(sizes: Sequence[dict[str, Any]], name: str, figure: str) -> float:
    """Exponent of a candidate's growth with the length, fitted over all lengths."""
    lengths = np.log([size["length"] for size in sizes])
    values = np.log([size["candidates"][name][figure] for size in sizes])
    return float(np.polyfit(lengths, values, 1)[0])


def _targets(sizes: Sequence[dict[str, Any]]) -> list[Target]:
    targets = []
    ours = [name for name in OURS if "median_ms" in sizes[0]["candidates"][name]]
    for size in sizes:
        if size["length"] >= 4096:
            best = min(size["candidates"][name]["median_ms"] for name in ours)
            targets.append(Target(f"n={size['length']}, the best of ours / limit", best / size["limit_ms"], 2.0))
        for name, (other, limit) in product(ours, AT_4096.items() if size["length"] == 4096 else ()):
            what = f"n=4096, {CANDIDATES[name].label} / {CANDIDATES[other].label}"
            targets.append(Target(what, ratio(size, name, other), limit))
    for name in ours if len(sizes) > 1 else ():
        label = CANDIDATES[name].label
        targets.append(Target(f"{label}: growth of time, exponent of n", _slope(sizes, name, "median_ms"), 1.1))
        targets.append(Target(f"{label}: growth of memory, exponent of n", _slope(sizes, name, "peak_mib"), 1.1))
    if "kernel" in ours:
        worst = max(sizes, key=memory_over_data)
        what = f"{CANDIDATES['kernel'].label}: memory of a call / its inputs and outputs, n={worst['length']}"
        targets.append(Target(what, memory_over_data(worst), MEMORY_OF_KERNEL))
    return targets


def memory_over_data(size: dict[str, Any]) -> float:
    """The compiled kernel's inputs and what its call adds at the peak, over inputs and outputs."""
    data = size["inputs_outputs_mib"]
    return float((data * 3 / 4 + size["candidates"]["kernel"]["peak_mib"]) / data)
