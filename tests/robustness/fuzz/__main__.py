"""A fuzzing campaign: `python -m tests.robustness.fuzz --count 10000` or `--minutes 30`; it ends with a table of what
came out.

Each case is drawn from its own seed, `KIND:NUMBER`; `--replay KIND:NUMBER` runs one again and prints how it ended.
`python -m tests.robustness.fuzz.guided KIND RUNS` is guided by coverage, where atheris is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from .campaign import draw, rota, run
from .judge import meet
from .kinds.targets import TARGETS
from .runner import Worker
from .seeds import Seeds


def main() -> int:
    """Run what was asked; 1 if a fault was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, help="cases to try in all")
    parser.add_argument("--minutes", type=float, help="how long to go on")
    parser.add_argument("--kind", "--target", action="append", choices=sorted(TARGETS), help="only these")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each kind")
    parser.add_argument("--keep", type=Path, help="folder for the files of faults")
    parser.add_argument("--json", type=Path, help="write all that was found to this file")
    parser.add_argument("--replay", help="KIND:NUMBER")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="localattn-fuzz-") as folder:
        seeds = Seeds(Path(folder))
        if asked.replay:
            kind, number = asked.replay.split(":")
            return _replay(kind, int(number), seeds)
        if asked.count is None and asked.minutes is None:
            parser.error("say --count or --minutes")
        end = float("inf") if asked.minutes is None else time.monotonic() + 60 * asked.minutes
        cases = islice(rota(asked.kind or list(TARGETS), asked.first), asked.count)
        tally = run(cases, seeds, end=end, keep=asked.keep)
    if asked.json is not None:
        asked.json.write_text(json.dumps(tally.document(), indent=1) + "\n")
    print(tally.table())
    return 1 if tally.faults else 0


def _replay(kind: str, number: int, seeds: Seeds) -> int:
    case = draw(kind, number, seeds)
    for name, content in case.files.items():
        print(f"{name}: {len(content)} bytes" if isinstance(content, bytes) else f"{name}: {content!r}")
    print(
        f"environment {dict(case.environment)}, modes {dict(case.modes)}, owners {dict(case.owners)}, free {case.free}"
    )
    print("localattn", *map(repr, case.arguments), case.streams or "")
    worker = Worker()
    try:
        with tempfile.TemporaryDirectory(prefix="localattn-case-") as place:
            code, faults = meet(worker, case, Path(place), seeds.marker)
    finally:
        print(json.dumps(worker.last, indent=1))
        worker.close()
    print(f"exit code {code};", *(faults or ("as documented",)), sep="\n  ")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
