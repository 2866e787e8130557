"""A fuzzing campaign: `python -m tests.fuzz --count 10000` or `--minutes 30`; faults are kept in a folder.

Each case is drawn from its own seed, `TARGET:NUMBER`; `--replay TARGET:NUMBER` runs one again and prints how it ended.
`python -m tests.fuzz.guided TARGET RUNS` is guided by coverage, where atheris is installed.
"""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from .judge import Worker, lay_out, meet
from .seeds import Seeds
from .targets import TARGETS


def main() -> int:
    """Run what was asked; 1 if a fault was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=0, help="cases to try in all")
    parser.add_argument("--minutes", type=float, default=0.0, help="how long to go on")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only these")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each target")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-faults"), help="folder for what was found")
    parser.add_argument("--replay", help="TARGET:NUMBER")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="localattn-fuzz-") as folder:
        seeds = Seeds(Path(folder))
        if asked.replay:
            name, number = asked.replay.split(":")
            return _replay(name, int(number), seeds, asked.keep)
        if not asked.count and not asked.minutes:
            parser.error("say --count or --minutes")
        return _campaign(asked, seeds)


def _campaign(asked: argparse.Namespace, seeds: Seeds) -> int:
    names = asked.target or list(TARGETS)
    least = 1 if asked.target else 0
    rota = [name for name in names for _ in range(max(TARGETS[name].weight, least))]
    tried: collections.Counter[str] = collections.Counter()
    faults: list[dict[str, str]] = []
    codes: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in names}
    worker = Worker()
    end = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    while (not asked.count or tried.total() < asked.count) and time.monotonic() < end:
        name = rota[tried.total() % len(rota)]
        number = asked.first + tried[name]
        tried[name] += 1
        if tried.total() % 250 == 0:
            print(f"{tried.total()} cases, {len(faults)} faults", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="localattn-case-") as place:
            case = TARGETS[name].make(Random(f"{name}:{number}"), seeds)
            code, fault = meet(worker, case, Path(place))
            codes[name][str(code)] += 1
            if fault is not None:
                faults.append({"case": f"{name}:{number}", "fault": fault})
                print(f"{name}:{number}  {fault}", flush=True)
                kept = asked.keep / f"{name}-{number}"
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(place, kept, symlinks=True, dirs_exist_ok=True)
    worker.close()
    report = {
        "tried": dict(tried),
        "total": tried.total(),
        "exit_codes": {name: dict(sorted(found.items())) for name, found in codes.items()},
        "worker_starts": worker.starts,
        "faults": faults,
    }
    print(json.dumps(report, indent=1))
    return 1 if faults else 0


def _replay(name: str, number: int, seeds: Seeds, keep: Path) -> int:
    case = TARGETS[name].make(Random(f"{name}:{number}"), seeds)
    kept = keep / f"{name}-{number}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    arguments = lay_out(case, kept)
    print("localattn", *arguments)
    worker = Worker()
    print(json.dumps(worker.ask(arguments), indent=1))
    worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
