"""The attention node beside every alternative, over lengths, windows, geometries, masks and element types.

What cannot run in a cell, or would take seconds there, has the reason in its row. All outputs of a cell are compared
before anything is timed, and the candidates take turns. A peer that is several times slower than the node is timed
once: more samples would change nothing but the benchmark's own time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from localattn.core.error_texts import named_line

from ..candidates import HEAD_DIM, HEADS, THREADS
from ..cases.memory import leave_some_memory
from ..clock import interleave
from ..limit.program import instruction_set
from ..limit.roofline import Loops
from ..machine import describe_machine
from ..target import Target
from .candidates import Run
from .grid import NUMPY_TYPE, QUICK, Array, Cell, choose
from .store import Row, Store, differing
from .table import OURS, PEERS

# The largest difference between two ways to add up the same products.
AGREEMENT = {"fp32": 2e-5, "fp16": 2e-2}
_SAMPLES = 3
# Two medians of three samples differ by as much on an idle machine.
NOISE = 1.05
# A peer that takes so many times as long as the fastest, and so many seconds, is timed by the best of a few calls.
_SLOW, _SLOW_SECONDS = 6, 0.1
_FEW, _FEW_SECONDS = 3, 1.0


def measure(
    store: Store,
    wanted: Sequence[Cell],
    seconds: float,
    tell: Callable[[str], None],
    *,
    thorough: bool = False,
) -> Row:
    """Measure cells and return the document of all that is known by then.

    Args:
        store: what is known; every cell is kept there as soon as it is measured.
        wanted: the cells to measure.
        seconds: how long to wait for calm samples in each.
        tell: told each step.
        thorough: compile and export the peers that are slow to make in every cell.
    """
    leave_some_memory()
    for place, cell in enumerate(wanted, start=1):
        begin = time.perf_counter()
        row = cell.to_dict() | measure_cell(cell, seconds, thorough=thorough)
        row["seconds"] = round(time.perf_counter() - begin, 1)
        store.add(cell, row, _setting())
        slower = "; ".join(_behind(row))
        tell(f"{place} of {len(wanted)}, {row['seconds']:.0f} s: {cell.name}{slower and f' ({slower})'}")
    return store.publish(_setting() | {"targets": [target.to_dict() for target in targets(store.ordered())]})


def cells_to_measure(
    store: Store, *, only: Sequence[str], noisy: float | None, resume: bool, quick: bool
) -> list[Cell]:
    """Which cells a call measures; the store then holds what it goes on from.

    Args:
        store: empty; earlier rows are read into it where they are gone on from.
        only: filters; cells that do not fit keep their earlier rows.
        noisy: only cells measured while others took more than this share of the processors.
        resume: only cells without a row.
        quick: the shortest length and two windows only.

    Raises:
        ValueError: an unknown filter, or the earlier rows are of another machine or other versions.
    """
    wanted = choose([*only, *(QUICK if quick else ())])
    if only or resume or noisy is not None:
        earlier = store.read()
        if earlier is not None and (differs := differing(earlier, describe_machine())):
            raise ValueError(f"The earlier cells were measured elsewhere: {'; '.join(differs)}.")
    if noisy is not None:
        calm = set(store.noisy(noisy))
        wanted = [cell for cell in wanted if cell in calm]
    return store.missing(wanted) if resume else wanted


def _setting() -> Row:
    setting = {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "threads": THREADS, "layout": "heads first"}
    return {
        "setting": setting | {"instruction_set": instruction_set()},
        "labels": {name: peer.label for name, peer in PEERS.items()},
    }


def measure_cell(cell: Cell, seconds: float, *, thorough: bool = False) -> Row:
    """The row of a cell: its limit, and of every peer the time or the reason why there is none."""
    runs, entries = _prepare(cell, thorough=thorough)
    times = {name: _best_of_few(run) for name, run in runs.items()}
    fastest = min(times.values())
    slow = {
        name for name, seconds in times.items() if seconds > max(_SLOW_SECONDS, _SLOW * fastest) and name not in OURS
    }
    loops = Loops(HEADS * cell.length * HEAD_DIM, np.dtype(NUMPY_TYPE[cell.dtype]).itemsize, THREADS)
    ready: dict[str, Callable[[], Run]] = {name: partial(_same, run) for name, run in runs.items() if name not in slow}
    measured = interleave({**ready, **loops.ready}, samples=_SAMPLES, least=_SAMPLES, seconds=seconds)
    operations = 4 * HEADS * HEAD_DIM * cell.count_pairs(cell.inputs() if cell.masked else {})
    roofline = loops.roofline(measured.timings)
    limit = roofline.limit(operations)
    for name in runs:
        timing = {"median_ms": round(1e3 * times[name], 3)}
        if name not in slow:
            timing = measured.timings[name].in_milliseconds()
        samples = 1 if name in slow else measured.counts[name]
        entries[name] = timing | {"over_limit": round(timing["median_ms"] / (1e3 * limit), 3), "samples": samples}
    return {
        **roofline.to_dict(operations),
        "others_cpu": None if math.isnan(measured.others) else round(measured.others, 3),
        "candidates": {name: entries[name] for name in PEERS},
    }


def _prepare(cell: Cell, *, thorough: bool) -> tuple[dict[str, Run], Row]:
    """The calls to time, all of which were run once and gave the node's output; the reasons of the others."""
    torch.compiler.reset()  # else a function compiled for many cells is compiled no more, and runs as it is
    feed = cell.inputs()
    runs: dict[str, Run] = {}
    entries: Row = {}
    expected: Array | None = None
    for name, peer in PEERS.items():
        reason = peer.why_not(cell, thorough=thorough)
        if reason is None:
            try:
                run = peer.prepare(cell, feed)
                output = _heads_first(run())
            except Exception as error:  # a peer's own failure is a finding, and ours must not hide
                if name == "node":
                    raise
                reason = named_line(error, 160)
            else:
                expected = output if expected is None else expected
                difference = float(np.abs(output - expected).max())
                if difference <= AGREEMENT[cell.dtype]:
                    runs[name] = run
                    continue
                reason = f"computes something else: differs by {difference:.2g}"
                if name in OURS:
                    raise AssertionError(f"{peer.label}, {cell.name}: {reason}")
        entries[name] = {"skipped": reason}
    return runs, entries


def _best_of_few(run: Run) -> float:
    """Seconds of the fastest of a few calls; of one call that takes long."""
    begin, best = time.perf_counter(), math.inf
    for _ in range(_FEW):
        start = time.perf_counter()
        run()
        end = time.perf_counter()
        best = min(best, end - start)
        if end - begin > _FEW_SECONDS:
            break
    return best


def _same(run: Run) -> Run:
    return run


def _heads_first(output: Array) -> Array:
    """fp32 `[1, H, N, D]`, of that or of `[1, N, H·D]`."""
    output = output.astype(np.float32)
    if output.ndim == 4:
        return output
    return output.reshape(1, -1, HEADS, HEAD_DIM).transpose(0, 2, 1, 3)


def times(row: Row) -> dict[str, float]:
    """Milliseconds of every candidate that ran in a cell."""
    return {name: entry["median_ms"] for name, entry in row["candidates"].items() if "median_ms" in entry}


def fastest_peer(row: Row, ours: str) -> tuple[str, float]:
    """The best alternative of a cell and our time over its; ("", 0) where none of the two ran."""
    known = times(row)
    peers = {name: value for name, value in known.items() if name not in OURS}
    best = min(peers, key=lambda name: peers[name], default="")
    return (best, known[ours] / peers[best]) if best and ours in known else ("", 0.0)


def _behind(row: Row) -> list[str]:
    """Where one of ours is slower than a peer, in words."""
    found = ((ours, *fastest_peer(row, ours)) for ours in OURS)
    return [f"{PEERS[ours].short} takes {ratio:.2f} × {PEERS[peer].short}" for ours, peer, ratio in found if ratio > 1]


def best_over_limit(row: Row) -> float:
    """Of ours, the faster over the limit."""
    known = times(row)
    return float(min(known[name] for name in OURS if name in known) / row["limit_ms"])


def targets(rows: Sequence[Row]) -> list[Target]:
    """The best of ours against the limit where that was asked, and each of ours against the best peer of every cell."""
    found = []
    long = [row for row in rows if row["length"] >= 4096 and row["dtype"] == "fp32"]
    if long:
        worst = max(long, key=best_over_limit)
        what = f"best of ours / limit, the worst of {len(long)} fp32 cells of n ≥ 4096 ({Cell.of(worst).name})"
        found.append(Target(what, best_over_limit(worst), 2.0))
    for ours in OURS:
        compared = [row for row in rows if fastest_peer(row, ours)[0]]
        if compared:
            worst = max(compared, key=lambda row: fastest_peer(row, ours)[1])
            peer, ratio = fastest_peer(worst, ours)
            what = f"{PEERS[ours].label} / {PEERS[peer].label}, the worst of {len(compared)} cells"
            found.append(Target(f"{what} ({Cell.of(worst).name})", ratio, NOISE))
    return found
