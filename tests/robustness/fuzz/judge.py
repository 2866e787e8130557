"""How a command ended on a case, and what of it is a fault; `FAULTS` lists the kinds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localattn.core.errors import ExitCode

from ...conftest import STAGE
from .case import Case, Entry, Streams, environment, laid_out, of_others, snapshot
from .process import run_process
from .runner import GROWTH, Worker

ALLOWED = {int(code) for code in ExitCode} - {int(ExitCode.INTERNAL)}
# Controls but for tab and line feed, and marks that turn the direction of writing: none of our own output into a pipe
# has one, so a text from outside brought it.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
# Each kind of fault, and what the table of a campaign calls it.
FAULTS = {
    "internal": "exit code 70",
    "hang": "hangs: over 60 s of processor time, or 300 s",
    "lost": "files lost, moved or changed",
    "foreign": "foreign code run",
    "left": "files left behind",
    "signal": "ended by a signal",
    "memory": "memory beyond its limit",
    "code": "undocumented exit code, or none",
    "traceback": "tracebacks",
    "silent": "errors without a message",
    "forged": "texts of a file that steer the terminal",
}


@dataclass(frozen=True)
class Fault:
    """What is wrong with how a command ended: a key of `FAULTS`, and what was seen."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{FAULTS[self.kind]}: {self.detail}"


def meet(worker: Worker, case: Case, folder: Path, marker: Path | None = None) -> tuple[int | None, list[Fault]]:
    """Run the command on the case.

    Args:
        worker: runs cases that need no process of their own.
        case: what to run.
        folder: an empty folder; the case gets one below it, so that `..` is ours too.
        marker: the file that planted code makes.

    Returns:
        The exit code, None where there is none; and the faults, none if it ended as documented.
    """
    here = folder / "here"
    here.mkdir()
    if marker is not None:
        marker.unlink(missing_ok=True)
    with laid_out(case, here) as arguments:
        before = snapshot(here)
        variables = environment(case, here)
        if case.streams is None:
            answer = worker.ask(arguments, here, variables)
        else:
            answer = run_process(arguments, here, worker.environment(variables), case.streams)
        worker.last = answer
        after = snapshot(here)
        faults = [*_ended(answer, case), *_files(answer.get("code"), case, before, after)]
        strays = {path.name for path in folder.iterdir()} - {"here"} | set(worker.strays())
        if strays:
            faults.append(Fault("left", f"outside its folder: {sorted(strays)}"))
        if marker is not None and marker.exists():
            marker.unlink()
            if not case.names_code:
                faults.append(Fault("foreign", "a planted library or pickle ran"))
    return answer.get("code"), faults


def _ended(answer: dict[str, Any], case: Case) -> list[Fault]:
    """Faults of how the process ended, and of what it said."""
    for kind in ("signal", "hang"):
        if kind in answer:
            return [Fault(kind, str(answer[kind]))]
    code, said = answer["code"], answer["err"]
    if answer["escaped"]:
        return [Fault("traceback", f"escaped: {answer['escaped']}")]
    if code == ExitCode.INTERNAL:
        return [Fault("internal", said[:300])]
    if code not in ALLOWED:
        return [Fault("code", f"{code}: {said[:300]}")]
    asked = {"-v", "-vv", "--verbose"} & set(case.arguments)  # an error's traceback is what it shows
    if "Traceback" in answer["out"] + ("" if asked else said) or "Exception ignored" in said:
        return [Fault("traceback", said[:300])]
    said_in_all = answer["out"] + said
    # What a model generates is written into a pipe as it is.
    if case.arguments[0] != "generate" and (steering := _STEERING.search(said_in_all)):
        return [Fault("forged", f"{steering[0]!r} in {said_in_all[max(0, steering.start() - 80) :][:160]!r}")]
    if answer["grown"] > GROWTH:
        return [Fault("memory", f"{answer['grown'] >> 20} MiB")]
    heard = case.streams is None or case.streams.err == "pipe"
    return [Fault("silent", f"exit code {code}")] if heard and code > 1 and not STAGE.sub("", said).strip() else []


def _files(code: int | None, case: Case, before: dict[str, Entry], after: dict[str, Entry]) -> list[Fault]:
    """Faults of what is on the disk: what was there is as it was, and what is new belongs there."""
    # A command whose message could not be written may still have done its work.
    finished = code in (0, 1) or (case.streams is not None and case.streams != Streams())
    lost = [
        name
        for name in before
        if before[name] != after.get(name) and not (finished and name in after and case.may_change(name))
    ]
    new = after.keys() - before.keys() - of_others(after)
    left = [name for name in new if not (finished and case.may_leave(name))]
    faults = [Fault("lost", f"{sorted(lost)} after exit code {code}")] if lost else []
    return [*faults, Fault("left", f"{sorted(left)} after exit code {code}")] if left else faults
