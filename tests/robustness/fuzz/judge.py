"""How a command ended on a case, and what of it is a fault; `FAULTS` lists the kinds."""

from __future__ import annotations

import os
import re
import signal
import stat
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localattn.core.errors import ExitCode

from ...conftest import STAGE
from .case import FORGED, SECRET, Case, Entry, Streams, environment, laid_out, of_others, snapshot
from .process import run_process
from .runner import GROWTH, Worker
from .server import Contacts, serving
from .torn import torn

ALLOWED = {int(code) for code in ExitCode} - {int(ExitCode.INTERNAL)}
# Controls but for tab and line feed, and marks that turn the direction of writing: none of our own output into a pipe
# has one, so a text from outside brought it.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
# Each kind of fault, and what the table of a campaign calls it.
FAULTS = {
    "internal": "exit code 70",
    "hang": "hangs: over 60 s of processor time, or 900 s",
    "lost": "files lost, moved or changed",
    "foreign": "foreign code run",
    "left": "files left behind",
    "signal": "ended by a signal",
    "memory": "memory beyond its limit",
    "code": "undocumented exit code, or none",
    "traceback": "tracebacks",
    "silent": "errors without a message",
    "forged": "texts of a file that steer the terminal, or stand as lines of ours",
    "believed": "exit code 0 where nothing was right",
    "leaked": "private files that were shown or copied",
    "elsewhere": "other servers that were asked",
    "late": "more than 2 s until it ended when asked to",
    "half": "half-written files, or untrue words of what was written",
    "processes": "processes left behind",
}
# Seconds in which a command ends that was asked to; and more, for the coarse clock of the fuzzer.
_GRACE = 2.25
_FORGED_LINE = re.compile(rf"^[ >#*-]*(\S{1, 9} )?{FORGED}", re.MULTILINE)


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
    with laid_out(case, here) as given, _served(case) as (names, contacts):
        before = snapshot(here)
        variables = environment(case, here)
        arguments = [_named(argument, names) for argument in given]
        if case.streams is not None:
            answer = run_process(arguments, here, worker.environment(variables), case.streams)
        elif case.own_process or case.requests:
            answer = worker.fork(arguments, here, variables, case.requests)
        else:
            answer = worker.ask(arguments, here, variables, hurried=bool(case.answers))
        worker.last = answer
        after = snapshot(here)
        faults = [*_ended(answer, case), *_files(answer.get("code"), case, before, after)]
        faults += _shown(answer, before, after)
        if case.requests:
            faults += _stopped(answer)
        faults += _torn(answer, before, after)
        strays = {path.name for path in folder.iterdir()} - {"here"} | set(worker.strays())
        if strays:
            faults.append(Fault("left", f"outside its folder: {sorted(strays)}"))
        if marker is not None and marker.exists():
            marker.unlink()
            if not case.names_code:
                faults.append(Fault("foreign", "a planted library or pickle ran"))
        if contacts.elsewhere:
            faults.append(Fault("elsewhere", "the server sent the command to another one, and it went"))
    return answer.get("code"), faults


def _served(case: Case) -> AbstractContextManager[tuple[dict[str, str], Contacts]]:
    """The servers of a case."""
    return serving(case.answers) if case.answers else nullcontext(({}, Contacts()))


def _named(argument: str, names: dict[str, str]) -> str:
    for name, address in names.items():
        argument = argument.replace(name, address)
    return argument


def _ended(answer: dict[str, Any], case: Case) -> list[Fault]:
    """Faults of how the process ended, and of what it said."""
    for kind in ("signal", "hang"):
        # Before the command begins and after it has ended, a signal does what it does by itself.
        asked = {signal.Signals(each.number).name for each in case.requests}
        if kind in answer and answer[kind] not in asked:
            return [Fault(kind, str(answer[kind]))]
    if "code" not in answer:
        return []
    code, said = answer["code"], answer["err"]
    if answer["escaped"]:
        return [Fault("traceback", f"escaped: {answer['escaped']}")]
    if code == ExitCode.INTERNAL:
        return [Fault("internal", said[:300])]
    if answer.get("processes"):
        return [Fault("processes", f"{answer['processes']} after exit code {code}")]
    if code == 0 and case.must_fail:
        return [Fault("believed", answer["out"][:300])]
    if 0 < case.seconds < answer.get("clock", 0.0):
        return [Fault("hang", f"{answer['clock']:.0f} s by the clock, not {case.seconds:.0f}")]
    if code not in ALLOWED | ({128 + each.number for each in case.requests} if answer.get("asked") else set()):
        return [Fault("code", f"{code}: {said[:300]}")]
    asked = {"-v", "-vv", "--verbose"} & set(case.arguments)  # an error's traceback is what it shows
    if "Traceback" in answer["out"] + ("" if asked else said) or "Exception ignored" in said:
        return [Fault("traceback", said[:300])]
    said_in_all = answer["out"] + said
    # What a model generates is written into a pipe as it is.
    if forged := _FORGED_LINE.search(said if case.arguments[0] == "generate" else said_in_all):
        return [Fault("forged", f"a line of its own: {forged.string[max(0, forged.start() - 80) :][:200]!r}")]
    coloured = "FORCE_COLOR" in case.environment  # then our own output has colours
    if case.arguments[0] != "generate" and not coloured and (steering := _STEERING.search(said_in_all)):
        return [Fault("forged", f"{steering[0]!r} in {said_in_all[max(0, steering.start() - 80) :][:160]!r}")]
    if answer["grown"] > GROWTH:
        return [Fault("memory", f"{answer['grown'] >> 20} MiB")]
    if code >= 128:  # what it says then is compared with what it wrote
        return []
    heard = case.streams is None or case.streams.err == "pipe"
    return [Fault("silent", f"exit code {code}")] if heard and code > 1 and not STAGE.sub("", said).strip() else []


def _files(code: int | None, case: Case, before: dict[str, Entry], after: dict[str, Entry]) -> list[Fault]:
    """Faults of what is on the disk: what was there is as it was, and what is new belongs there."""
    # A command whose message could not be written may still have done its work.
    # Outputs of one command appear one after another, so a full disk may meet the second of them.
    finished = (
        code in (0, 1)
        or bool(case.requests)
        or case.free is not None
        or (case.streams is not None and case.streams != Streams())
    )
    lost = [
        name
        for name in before
        if before[name] != after.get(name) and not (finished and name in after and case.may_change(name))
    ]
    new = after.keys() - before.keys() - of_others(after)
    left = [name for name in new if not (finished and case.may_leave(name))]
    faults = [Fault("lost", f"{sorted(lost)} after exit code {code}")] if lost else []
    return [*faults, Fault("left", f"{sorted(left)} after exit code {code}")] if left else faults


def _shown(answer: dict[str, Any], before: dict[str, Entry], after: dict[str, Entry]) -> list[Fault]:
    """Faults of what came out of private files."""
    secret = SECRET.decode()
    faults = [Fault("leaked", f"in {name}") for name in ("out", "err") if secret in answer.get(name, "")]
    for name in sorted(after.keys() - before.keys()):
        content = after[name][-1]
        if secret in (content if isinstance(content, str) else content.decode("latin-1")):
            faults.append(Fault("leaked", f"in {name}"))
    return faults


def _stopped(answer: dict[str, Any]) -> list[Fault]:
    """Faults of a command that was asked to end: it does so in time, where processors are free."""
    took = answer.get("took", 0.0)
    if os.getloadavg()[0] > (os.cpu_count() or 1):  # then it tells how long others held the processors
        return []
    return [Fault("late", f"{took:.1f} s")] if took > _GRACE else []


def _torn(answer: dict[str, Any], before: dict[str, Entry], after: dict[str, Entry]) -> list[Fault]:
    """Faults of what a command wrote that did not come to its end: it is whole, and told."""
    code = answer.get("code", 128)
    if code in (0, 1):
        return []
    every = {name: entry[-1] for name, entry in after.items() if isinstance(entry[-1], bytes)}
    changed = {name: content for name, content in every.items() if after[name] != before.get(name)}
    files = {name: content for name, content in changed.items() if stat.S_ISREG(int(after[name][0], 8))}
    faults = [Fault("half", f"{name}: {why}") for name, why in torn(files, every)]
    if files and code >= 128 and "nothing was written" in answer.get("err", ""):
        faults.append(Fault("half", f"it says that nothing was written, and {sorted(files)[:3]} was"))
    return faults
