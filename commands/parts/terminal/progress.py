"""Show the stage of a long command on stderr: on a terminal one line that changes, elsewhere one line a stage."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Stages may have a count: "Round 3 of 12", "Tactic selection 3/12".
_COUNT = re.compile(r"\b(\d+)(?:/| of )(\d+)\b")


def share(stage: str) -> float | None:
    """Return how much of a counted stage is done; None if unknown.

    "3 of 12" is a step that begins, "3/12" one that has ended.
    """
    found = _COUNT.search(stage)
    if found is None or not 0 < int(found[1]) <= int(found[2]):
        return None
    return (int(found[1]) - (" of " in found[0])) / int(found[2])


@contextmanager
def on_terminal() -> Iterator[Callable[[str], None]]:
    """Show the stage in one line, with the time since the command began and the share of a counted stage."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}{task.fields[share]}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Starting …", share="")

        def show(stage: str) -> None:
            done = share(stage)
            bar.update(task, description=f"{stage} …", share="" if done is None else f" {done:.0%}")

        yield show


@contextmanager
def as_lines() -> Iterator[Callable[[str], None]]:
    """Show each stage in a line, with the seconds since the command began; a counted stage has one line in all."""
    begin = time.perf_counter()
    last = ""

    def show(stage: str) -> None:
        nonlocal last
        name = _COUNT.split(stage)[0]
        if name != last:
            print(f"{time.perf_counter() - begin:6.1f} s  {stage}", file=sys.stderr, flush=True)
        last = name

    yield show
