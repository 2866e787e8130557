"""Measure the candidates: each is loaded in its own process, then in every round each takes a turn.

Only one candidate runs at a time; the others wait for their next request without using the processor. The order
changes from round to round, so that no candidate always follows the same one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from ...core.at_work import temporary_folder
from ...core.documents.bench_report import BUSY, BenchReport, BenchRow, BenchSettings, Memory, Profile, Ratio
from ...core.tensors import TensorSpec
from ...core.versions import installed
from ..backends import registry
from ..inputs.arrays import save_arrays
from ..inputs.vocabulary import vocabulary
from ..session import read_model_sidecar
from .cautions import find_warnings
from .inputs import Sizes, draw, from_file, sizes_of
from .process import WorkerProcess
from .request import BenchRequest, Candidate, labels
from .resources import machine
from .statistics import busy_share, histogram, latency, paired_ratio

Step = Callable[[str], None]

# An engine's threads keep spinning for a moment after a call: the next turn waits for them.
_PAUSE = 0.05


@dataclass
class _Runner:
    """A candidate while it is measured."""

    candidate: Candidate
    label: str
    process: WorkerProcess
    opened: dict[str, Any]
    sizes: Sizes
    inputs: Path
    bound: dict[str, Any] = field(default_factory=dict)
    turns: list[list[int]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def rounds_ms(self) -> list[float]:
        """Return the median of each round in milliseconds."""
        return [float(np.median(turn)) / 1e6 for turn in self.turns]

    def is_disturbed(self) -> bool:
        """Return whether other programs kept the machine busy in more than half of the turns; False if unknown."""
        share = busy_share(self.others)
        return share is not None and share > BUSY


def run_bench(request: BenchRequest, step: Step = lambda _: None) -> BenchReport:
    """Measure every candidate of a request, and return the report.

    Args:
        request: what and how.
        step: called with a line for each step as it begins.

    Raises:
        UsageError: a model or inputs that do not fit, an option that does not apply.
        MissingDependency: an engine or a provider that is not here.
        CheckFailed: a candidate's process died.
    """
    candidates = request.candidates()
    named = labels(candidates)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("localattn-bench-"))
        inputs = _Inputs(request, folder)
        runners = []
        for candidate in candidates:
            step(f"Loading {named[candidate]}")
            runners.append(_start(request, candidate, named[candidate], stack, inputs))
        for runner in runners:
            step(f"Warming up {runner.label}")
            runner.bound = runner.process.ask(
                "bind", inputs=str(runner.inputs), cuda_graph=request.cuda_graph, warmup_ms=request.warmup_ms
            )
        _take_turns(request, runners, step)
        memory = {runner.label: Memory(**runner.process.ask("end")) for runner in runners}
        profiles = _profiles(request, runners, step) if request.profile else []
    rows = _rows(request, runners, memory)
    return BenchReport(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=machine(),
        versions=installed(("localattn", "numpy", *registry.distributions(), *(("torch",) if request.module else ()))),
        settings=BenchSettings(
            duration=request.duration,
            iterations=request.iterations,
            warmup_ms=request.warmup_ms,
            rounds=request.rounds,
            seed=request.seed,
            input_source=inputs.source,
        ),
        rows=rows,
        profiles=profiles,
        warnings=[
            *(f"{runner.label}: {line}." for runner in runners for line in runner.opened["notes"]),
            *find_warnings(rows, request.percentiles),
        ],
    )


class _Inputs:
    """Chooses inputs, and stores them in files that the processes read."""

    def __init__(self, request: BenchRequest, folder: Path) -> None:
        self._request, self._folder = request, folder
        self._first: dict[str, Any] | None = None
        self._limit: int | None = None
        self._written = 0
        self.source = str(request.inputs.name) if request.inputs else f"random, seed {request.seed}"

    def choose(self, candidate: Candidate, specs: Sequence[TensorSpec]) -> tuple[Path, Sizes]:
        """Return the file of a candidate's inputs, and their sizes."""
        sidecar = read_model_sidecar(candidate.model)
        if self._request.inputs is not None:
            _, sizes = from_file(self._request.inputs, specs, sidecar)
            return self._request.inputs, sizes
        sizes = sizes_of(candidate.model, specs, sidecar, self._request.batch, candidate.seq_len)
        arrays = draw(specs, sizes, sidecar, self._request.seed, self._first, self._limit)
        if self._first is None:
            self._first, self._limit = dict(arrays), vocabulary(sidecar)
        path = self._folder / f"inputs{self._written}.npz"
        self._written += 1
        save_arrays(path, arrays)
        return path, sizes


def _start(request: BenchRequest, candidate: Candidate, label: str, stack: ExitStack, inputs: _Inputs) -> _Runner:
    process = stack.enter_context(
        WorkerProcess(label) if candidate.module is None else WorkerProcess(label, candidate.module.worker)
    )
    opened = process.open(candidate, cuda_graph=request.cuda_graph)
    specs = [TensorSpec(spec["name"], spec["dtype"], tuple(spec["shape"])) for spec in opened["inputs"]]
    path, sizes = inputs.choose(candidate, specs)
    return _Runner(candidate, label, process, opened, sizes, path)


def _take_turns(request: BenchRequest, runners: Sequence[_Runner], step: Step) -> None:
    order = list(runners)
    shuffle = random.Random(request.seed).shuffle
    calls = -(-request.iterations // request.rounds)
    for number in range(request.rounds):
        shuffle(order)
        for runner in order:
            step(f"Round {number + 1} of {request.rounds}: {runner.label}")
            time.sleep(_PAUSE)
            answer = runner.process.ask("turn", seconds=request.duration / request.rounds, calls=calls)
            runner.turns.append(answer["nanoseconds"])
            if answer["others"] is not None:
                runner.others.append(answer["others"])


def _rows(request: BenchRequest, runners: Sequence[_Runner], memory: Mapping[str, Memory]) -> list[BenchRow]:
    first = runners[0]
    by_candidate = {runner.candidate: runner for runner in runners}
    candidates = list(by_candidate)
    rows = []
    for runner in runners:
        milliseconds = np.concatenate([np.asarray(turn, np.float64) for turn in runner.turns]) / 1e6
        rate = 1e3 * len(milliseconds) / float(milliseconds.sum())
        tokens = runner.sizes.tokens
        ratio: Ratio | None = None
        if runner is not first:
            other = by_candidate[runner.candidate.compared_with(candidates)]
            busy = runner.is_disturbed() or other.is_disturbed()
            ratio = paired_ratio(other.label, runner.rounds_ms(), other.rounds_ms(), busy=busy)
        rows.append(
            BenchRow(
                label=runner.label,
                model=runner.candidate.name,
                backend=runner.opened["backend"],
                provider=runner.opened["provider"],
                plugin=Path(runner.opened["plugin"]).name if runner.opened["plugin"] else None,
                threads=runner.candidate.threads,
                seq_len=runner.sizes.seq_len,
                batch=runner.sizes.batch,
                load_ms=runner.opened["load_ms"],
                **runner.bound,
                calls=len(milliseconds),
                latency=latency(milliseconds, request.percentiles),
                histogram=histogram(milliseconds),
                rounds_ms=runner.rounds_ms(),
                runs_per_s=rate,
                tokens_per_s=None if tokens is None else rate * tokens,
                memory=memory[runner.label],
                others=float(np.mean(runner.others)) if runner.others else None,
                busy=busy_share(runner.others),
                ratio=ratio,
            )
        )
    return rows


def _profiles(request: BenchRequest, runners: Sequence[_Runner], step: Step) -> list[Profile]:
    from .profile import profile_candidate

    profiles = []
    for runner in (x for x in runners if x.candidate.module is None):
        step(f"Profiling {runner.label}")
        profiles.append(profile_candidate(runner.candidate, runner.label, runner.inputs, request.top))
    return profiles
