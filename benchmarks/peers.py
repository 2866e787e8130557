"""The attention node beside every alternative, over lengths, windows, geometries, masks and element types.

All windows and element types at n = 1k, 4k and 16k; window 256 in fp32 at 2k, 8k and 32k too. What cannot run in a
cell, or would take seconds there, has the reason in its row. All outputs of a cell are compared before anything is
timed, and the candidates take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from localattn.core.geometry import WindowGeometry

from .candidates import HEAD_DIM, HEADS, THREADS
from .clock import interleave
from .memory import leave_some_memory
from .peers_candidates import PEERS, Array, Cell, Run
from .target import Target

EVERY_LENGTH, SOME_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768), (1024, 4096, 16384)
WINDOWS, MAIN_WINDOW = (64, 256, 512), 256
# Name, look_forward, causal, exact.
GEOMETRIES = (("causal exact", 0, True, True), ("causal block-local", 0, True, False), ("non-causal", 1, False, False))
QUICK = Cell(1024, WindowGeometry(64, 1, 0, True, True), False, "fp32")
# The largest difference between two ways to add up the same products.
AGREEMENT = {"fp32": 2e-5, "fp16": 2e-2}
_SQUARE = 2048
_SAMPLES = 3
# Two medians of three samples differ by as much on an idle machine.
_NOISE = 1.05


def cells(*, quick: bool) -> Iterator[tuple[str, Cell]]:
    """The grid: name of the geometry, cell."""
    for dtype in ("fp32", "fp16"):
        for window in WINDOWS:
            main = window == MAIN_WINDOW and dtype == "fp32"
            for length in EVERY_LENGTH if main else SOME_LENGTHS:
                for name, forward, causal, exact in GEOMETRIES:
                    for masked in (False, True):
                        cell = Cell(length, WindowGeometry(window, 1, forward, causal, exact), masked, dtype)
                        if not quick or (length <= 1024 and window != 512):
                            yield name, cell


def measure(seconds: float, tell: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """The whole benchmark as it is stored.

    Args:
        seconds: how long to wait for calm samples in each cell.
        tell: told each step.
        quick: the shortest length and two windows only.
    """
    leave_some_memory()
    rows = []
    for name, cell in cells(quick=quick):
        tell(f"n = {cell.length}, window {cell.geometry.window_size}, {name}, {cell.dtype}, mask: {cell.masked}")
        rows.append({"geometry": name, **_measure_cell(cell, seconds)})
    return {
        "setting": {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "threads": THREADS, "layout": "heads first"},
        "labels": {name: peer.label for name, peer in PEERS.items()},
        "cells": rows,
        "targets": [target.to_dict() for target in targets(rows)],
    }


def _measure_cell(cell: Cell, seconds: float) -> dict[str, Any]:
    feed = cell.inputs()
    runs: dict[str, Run] = {}
    entries: dict[str, dict[str, Any]] = {}
    outputs: dict[str, Array] = {}
    for name, peer in PEERS.items():
        reason = peer.why_not(cell)
        if reason is None:
            try:
                runs[name] = peer.prepare(cell, feed)
                outputs[name] = _heads_first(runs[name]())
            except Exception as error:  # a peer's own failure is a finding, and ours must not hide
                if name == "node":
                    raise
                runs.pop(name, None)
                reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:100]}"
        if reason is not None:
            entries[name] = {"skipped": reason}
    for name, output in outputs.items():
        difference = float(np.abs(output - outputs["node"]).max())
        if not difference <= AGREEMENT[cell.dtype]:
            if name == "node":
                raise AssertionError("the node gave no number")
            runs.pop(name)
            entries[name] = {"skipped": f"computes something else: differs by {difference:.2g}"}
    del outputs
    square = torch.rand(_SQUARE, _SQUARE)
    ready: dict[str, Callable[[], Callable[[], Any]]] = {name: partial(_same, run) for name, run in runs.items()}
    ready["square"] = lambda: lambda: square @ square
    measured = interleave(ready, samples=_SAMPLES, least=_SAMPLES, seconds=seconds)
    rate = 2 * _SQUARE**3 / measured.timings["square"].median
    keys = cell.geometry.mean_visible_keys(cell.length)
    limit = 4 * HEADS * cell.length * HEAD_DIM * keys / rate
    for name in runs:
        timing = measured.timings[name]
        entries[name] = timing.in_milliseconds() | {"over_limit": round(timing.median / limit, 3)}
    return {
        "length": cell.length,
        "window": asdict(cell.geometry),
        "masked": cell.masked,
        "dtype": cell.dtype,
        "limit_ms": round(1e3 * limit, 3),
        "matmul_gflops": round(rate / 1e9, 1),
        "others_cpu": None if math.isnan(measured.others) else round(measured.others, 3),
        "candidates": {name: entries[name] for name in PEERS},
    }


def _same(run: Run) -> Run:
    return run


def _heads_first(output: Array) -> Array:
    """fp32 `[1, H, N, D]`, of that or of `[1, N, H·D]`."""
    output = output.astype(np.float32)
    if output.ndim == 4:
        return output
    return output.reshape(1, -1, HEADS, HEAD_DIM).transpose(0, 2, 1, 3)


def fastest_peer(cell: dict[str, Any]) -> tuple[str, float]:
    """The best alternative of a cell and the node's time over its; ("", 0) where none ran."""
    times = {name: entry["median_ms"] for name, entry in cell["candidates"].items() if "median_ms" in entry}
    ours = times.pop("node")
    best = min(times, key=lambda name: times[name], default="")
    return (best, ours / times[best]) if best else ("", 0.0)


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    """The node against the limit where that was asked, and against the best peer of every cell."""
    found = []
    for row in rows:
        if row["length"] >= 4096 and row["dtype"] == "fp32":
            what = f"n={row['length']}, w={row['window']['window_size']}, {row['geometry']}{', mask' * row['masked']}"
            found.append(Target(f"{what}: node / limit", row["candidates"]["node"]["over_limit"], 2.0))
    found.append(Target("node / fastest peer, worst cell", max(fastest_peer(row)[1] for row in rows), _NOISE))
    return found
