"""The compiled kernel over its limit: small and large windows, element types, instruction sets, one thread and two.

Batch 1, 8 heads of 64, n = 4096, causal exact, inputs `[B, H, N, D]`. Every instruction set that this processor has is
measured in processes of its own, against its own multiply-adds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from rich.console import Console

from localattn.core.geometry import WindowGeometry
from localattn.core.versions import DEFAULT_OPSET

from ..candidates import HEAD_DIM, HEADS, Run, attention_node, in_onnxruntime, random_inputs, value_of
from ..cases.compiled import library
from ..cases.memory import in_child
from ..clock import interleave
from ..machine import own_result
from ..target import Target
from .program import instruction_set
from .roofline import Loops

LENGTH, WINDOWS, DTYPES = 4096, (16, 32, 64, 256, 1024), ("fp32", "fp16")
SETS, THREADS = ("avx512", "avx2", "neon"), (1, 2)
# The most time over the limit, by window.
MOST = {16: 2.0, 32: 2.0, 64: 1 / 0.45, 256: 1 / 0.7, 1024: 1 / 0.7}
_SAMPLES, _LEAST_SAMPLES, _SECONDS = 9, 5, 15


def measure(only: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark as it is stored.

    Args:
        only: instruction sets; the others keep their rows. Empty: all.
        tell: told each step.
    """
    library()
    known = (own_result("windows") or {"rows": []})["rows"] if only else []
    rows = []
    for name, threads in product(SETS, THREADS):
        if only and name not in only:
            rows += [row for row in known if (row["instruction_set"], row["threads"]) == (name, threads)]
            continue
        tell(f"Timing {name}, threads: {threads}")
        rows += in_child("windows", name, str(threads))["rows"]
    setting = {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "length": LENGTH, "geometry": "causal exact"}
    return {"setting": setting, "rows": rows, "targets": [target.to_dict() for target in _targets(rows)]}


def measure_set(name: str, threads: int) -> list[dict[str, Any]]:
    """One row a window and element type, none where this processor lacks the instructions."""
    os.environ["LOCALATTN_CPU_ISA"] = name
    if instruction_set() != name:
        return []
    torch.set_num_threads(threads)
    rows = []
    inputs = random_inputs(LENGTH)
    for dtype in DTYPES:
        feed = {key: x.astype(np.float16) if dtype == "fp16" else x for key, x in inputs.items()}
        loops = Loops(feed["query"].size, feed["query"].itemsize, threads)
        prepare = {str(window): partial(_kernel, feed, window, threads) for window in WINDOWS}
        measured = interleave(
            {**prepare, **loops.ready}, samples=_SAMPLES, least=_LEAST_SAMPLES, seconds=_SECONDS, most=_SECONDS
        )
        roofline = loops.roofline(measured.timings)
        for window in WINDOWS:
            operations = 4 * HEADS * LENGTH * HEAD_DIM * _geometry(window).mean_visible_keys(LENGTH)
            rows.append(
                {
                    "instruction_set": name,
                    "threads": threads,
                    "dtype": dtype,
                    "window": window,
                    **measured.timings[str(window)].in_milliseconds(),
                    "samples": measured.counts[str(window)],
                    **roofline.to_dict(operations),
                }
            )
    return rows


def _geometry(window: int) -> WindowGeometry:
    return WindowGeometry(window, look_backward=1, look_forward=0, causal=True, exact_windowsize=True)


def _kernel(feed: dict[str, NDArray[Any]], window: int, threads: int) -> Run:
    inputs = [value_of(name, list(x.shape), ir.DataType.from_numpy(x.dtype)) for name, x in feed.items()]
    node = attention_node(inputs, _geometry(window), masked=False)
    return in_onnxruntime(inputs, [node], feed, opset=DEFAULT_OPSET, kernels=library(), threads=threads)


def _targets(rows: list[dict[str, Any]]) -> list[Target]:
    targets = []
    fp32 = {(row["instruction_set"], row["threads"], row["window"]): row for row in rows if row["dtype"] == "fp32"}
    for row in rows:
        name = f"{row['instruction_set']}, threads: {row['threads']}, window {row['window']}"
        if row["dtype"] == "fp32":
            targets.append(Target(f"{name}: time / limit", row["median_ms"] / row["limit_ms"], MOST[row["window"]]))
        else:
            other = fp32[row["instruction_set"], row["threads"], row["window"]]
            targets.append(Target(f"{name}: fp16 / fp32", row["median_ms"] / other["median_ms"], 1.0))
    return targets


def print_windows(result: dict[str, Any]) -> None:
    """A line a row: milliseconds, share of the peak, and times the limit."""
    console = Console()
    for row in result["rows"]:
        case = f"{row['instruction_set']:8} {row['threads']} {row['dtype']} w={row['window']:<5}"
        times = f"{row['median_ms']:7.2f} ms ({row['p10_ms']:.2f}-{row['p90_ms']:.2f})"
        peak, limit = row["compute_ms"] / row["median_ms"], row["median_ms"] / row["limit_ms"]
        console.print(f"{case} {times}  {peak:4.0%} of the peak, {limit:.2f} x the limit by {row['bound']}")
