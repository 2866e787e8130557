"""Timing on a machine that other processes use too: interleaved samples, of which the calm ones count.

The candidates take turns, so that whatever else the machine does hits all of them alike, and each waits a
while for a calm moment. A sample is a tenth of a second or more of consecutive calls. It is judged by how
much processor time *other* processes took meanwhile, never by the time it measured: samples with little
of it count, and where there are too few, the calmest ones.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Run = Callable[[], object]

_STAT = Path("/proc/stat")
# Calm: others take less than this share of the processors. How long to wait for that, looking how often.
# The pause also lets the thread pool of the candidate before stop spinning.
_CALM, _PATIENCE, _MOMENT = 0.1, 2.0, 0.05
# The system counts processor time in hundredths of a second: shorter samples could not be judged.
_SAMPLE = 0.1


@dataclass(frozen=True)
class Timing:
    """Seconds a call: median, 10th and 90th percentile of the samples."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """The percentiles of a list of durations."""
        p10, median, p90 = np.percentile(seconds, [10, 50, 90])
        return cls(float(median), float(p10), float(p90))

    def in_milliseconds(self) -> dict[str, float]:
        """As it is stored."""
        named = {"median_ms": self.median, "p10_ms": self.p10, "p90_ms": self.p90}
        return {name: round(1e3 * seconds, 3) for name, seconds in named.items()}


@dataclass(frozen=True)
class Measurement:
    """What the samples say.

    Args:
        timings: by candidate.
        samples: how many samples of each candidate counted, at the least.
        others: mean share of the machine's processor time that other processes took in them; NaN
            where the system does not tell.
        counts: how many by candidate.
    """

    timings: dict[str, Timing]
    samples: int
    others: float
    counts: dict[str, int]


def interleave(
    candidates: Mapping[str, Callable[[], Run]],
    *,
    samples: int,
    least: int,
    seconds: float,
    fresh: bool = False,
    most: float = math.inf,
) -> Measurement:
    """Time every candidate in turn.

    Args:
        candidates: what prepares the call to time, by name.
        samples: stop when there are so many calm samples of each,
        least: or when there are so many, calm or not,
        seconds: and this long is over.
        fresh: prepare anew for every sample, with two untimed calls, instead of once, because all candidates
            together would not fit into memory.
        most: a candidate that ran so many seconds already, waiting not counted, takes no further sample: a peer many
            times slower than the others would have all the time, and its figure is known well enough.
    """
    kept_runs = {} if fresh else {name: _warm(prepare) for name, prepare in candidates.items()}
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    spent = dict.fromkeys(candidates, 0.0)
    begin = time.perf_counter()
    while wanted := [name for name in candidates if _count_calm(timed[name]) < samples and spent[name] <= most]:
        if time.perf_counter() - begin > seconds and min(len(timed[name]) for name in wanted) >= least:
            break
        for name in wanted:
            before = time.perf_counter()
            run, calls = kept_runs.get(name) or _warm(candidates[name])
            made = time.perf_counter() - before
            timed[name].append(_sample(run, calls))
            spent[name] += made + calls * timed[name][-1][1]
    kept = {
        name: sorted(pairs, key=lambda pair: pair[0])[: min(samples, max(least, _count_calm(pairs)))]
        for name, pairs in timed.items()
    }
    return Measurement(
        timings={name: Timing.of([duration for _, duration in pairs]) for name, pairs in kept.items()},
        samples=min(map(len, kept.values())),
        others=float(np.mean([share for pairs in kept.values() for share, _ in pairs])),
        counts={name: len(pairs) for name, pairs in kept.items()},
    )


def _warm(prepare: Callable[[], Run]) -> tuple[Run, int]:
    """The call, after two untimed ones (onnxruntime plans its memory in the first), and how many make a sample."""
    run = prepare()
    run()
    begin = time.perf_counter()
    run()
    return run, math.ceil(_SAMPLE / (time.perf_counter() - begin))


def _count_calm(samples: list[tuple[float, float]]) -> int:
    return sum(not share > _CALM for share, _ in samples)


def _sample(run: Run, calls: int) -> tuple[float, float]:
    """Others' share of the processors, and seconds a call."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < _PATIENCE:
        meter = _OthersMeter()
        time.sleep(_MOMENT)
        if not meter.share() > _CALM:
            break
    meter, begin = _OthersMeter(), time.perf_counter()
    for _ in range(calls):
        run()
    return meter.share(), (time.perf_counter() - begin) / calls


class _OthersMeter:
    """Share of the machine's processor time that other processes take from now on."""

    def __init__(self) -> None:
        self.begin, self.busy, self.own = time.perf_counter(), _machine_busy(), _own_busy()

    def share(self) -> float:
        """The share so far, NaN where the system does not tell."""
        available = (time.perf_counter() - self.begin) * (os.cpu_count() or 1)
        others = _machine_busy() - self.busy - (_own_busy() - self.own)
        return max(0.0, others) / available if others == others else others


def _machine_busy() -> float:
    """Seconds that all processors together have worked, time stolen by a hypervisor included."""
    if not _STAT.exists():
        return float("nan")
    with _STAT.open(encoding="ascii") as file:
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_busy() -> float:
    """Seconds of that which this process and its finished children used."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)
