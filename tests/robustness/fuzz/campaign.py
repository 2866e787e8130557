"""Running many cases, and the tables of what came out: as JSON, and as the Markdown of tests/robustness/README.md."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from .case import Case
from .judge import FAULTS, Fault, meet
from .kinds.targets import TARGETS
from .runner import Worker
from .seeds import Seeds


def draw(kind: str, number: int, seeds: Seeds) -> Case:
    """The case of this number: the same on every machine and in every run."""
    return TARGETS[kind].make(Random(f"{kind}:{number}"), seeds)


@dataclass
class Tally:
    """What a campaign found.

    Args:
        codes: exit codes by kind of case; "none" where the process was ended.
        faults: each with its case, `KIND:NUMBER`.
        worker_starts: how often the worker was started.
    """

    codes: dict[str, Counter[str]] = field(default_factory=dict)
    faults: list[tuple[str, Fault]] = field(default_factory=list)
    worker_starts: int = 0

    @property
    def cases(self) -> int:
        return sum(codes.total() for codes in self.codes.values())

    def add(self, kind: str, number: int, code: int | None, faults: Iterable[Fault]) -> None:
        self.codes.setdefault(kind, Counter())["none" if code is None else str(code)] += 1
        self.faults += [(f"{kind}:{number}", fault) for fault in faults]

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "total": self.cases,
            "exit_codes": {kind: dict(sorted(codes.items())) for kind, codes in self.codes.items()},
            "worker_starts": self.worker_starts,
            "faults": [{"case": case, "fault": fault.kind, "detail": fault.detail} for case, fault in self.faults],
        }

    def table(self) -> str:
        """Markdown: a row a kind of case, then a row a kind of fault."""
        rows = [(kind, f"{codes.total():,}", ", ".join(sorted(codes))) for kind, codes in self.codes.items()]
        found = Counter(fault.kind for _, fault in self.faults)
        counts = [(name, f"{found[kind]:,}") for kind, name in FAULTS.items()]
        return (
            _markdown(("kind", "cases", "exit codes"), rows)
            + "\n"
            + _markdown(("of all", "count"), [("cases", f"{self.cases:,}"), *counts])
        )


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def rota(kinds: Sequence[str], first: int = 0) -> Iterator[tuple[str, int]]:
    """Kinds and numbers without end, each kind by its weight; kinds that were named have a turn at the least."""
    turns = [kind for kind in kinds for _ in range(TARGETS[kind].weight or len(kinds) < len(TARGETS))]
    numbers = dict.fromkeys(kinds, first)
    while True:
        for kind in turns:
            yield kind, numbers[kind]
            numbers[kind] += 1


def run(
    cases: Iterable[tuple[str, int]], seeds: Seeds, *, end: float = float("inf"), keep: Path | None = None
) -> Tally:
    """Run cases one after another.

    Args:
        cases: kinds and numbers.
        seeds: what they are made from.
        end: when to stop, by `time.monotonic`.
        keep: a folder for the files of cases that are faults.
    """
    from .case import lay_out

    tally, worker = Tally(), Worker()
    try:
        for kind, number in cases:
            if time.monotonic() > end:
                break
            case = draw(kind, number, seeds)
            with tempfile.TemporaryDirectory(prefix="localattn-case-") as place:
                code, faults = meet(worker, case, Path(place), seeds.marker)
            tally.add(kind, number, code, faults)
            for fault in faults:
                print(f"{kind}:{number}  {fault}", flush=True)
            if faults and keep is not None:
                kept = keep / f"{kind}-{number}"
                kept.mkdir(parents=True)
                lay_out(case, kept)
            if tally.cases % 250 == 0:
                print(f"{tally.cases} cases, {len(tally.faults)} faults", file=sys.stderr, flush=True)
    finally:
        tally.worker_starts = worker.starts
        worker.close()
    return tally
