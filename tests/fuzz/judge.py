"""Running a case in a worker, and what is a fault: traceback, unknown exit code, signal, hang, memory, rubble."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localattn.core.errors import ExitCode

ALLOWED = {int(code) for code in ExitCode} - {int(ExitCode.INTERNAL)}
SECONDS = 90.0  # on a busy machine; cases take milliseconds
GROWTH = 1 << 30  # bytes of memory a case of a few kilobytes may take


@dataclass(frozen=True)
class Case:
    """Files to write into an empty folder, and the command to run on them.

    Args:
        files: by relative path; the content, or the target of a link as text.
        arguments: of the command line; `{}` stands for the folder.
        outputs: what the command may leave in the folder, whole.
    """

    files: dict[str, bytes | str]
    arguments: tuple[str, ...]
    outputs: tuple[str, ...] = ()


@dataclass
class Worker:
    """A worker process that is started again when a case ended it."""

    starts: int = 0
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def ask(self, arguments: list[str]) -> dict[str, Any]:
        """How the command ended; `signal` or `hang` instead where it did not."""
        if self._process is None:
            self.starts += 1
            command = [sys.executable, "-m", "tests.fuzz.worker"]
            root = Path(__file__).resolve().parents[2]
            self._process = subprocess.Popen(
                command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(arguments) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], SECONDS)
        line = process.stdout.readline() if ready else ""
        if line:
            return dict(json.loads(line))
        if not ready:
            process.kill()
        code = process.wait()
        self._process = None
        return (
            {"hang": SECONDS} if not ready else {"signal": signal.Signals(-code).name if code < 0 else f"exit {code}"}
        )

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None


def lay_out(case: Case, folder: Path) -> list[str]:
    """Write the files; the arguments with the folder put in."""
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
    return [argument.replace("{}", str(folder)) for argument in case.arguments]


def meet(worker: Worker, case: Case, folder: Path) -> tuple[int | None, str | None]:
    """The exit code of the command on this case, and what is wrong with how it ended; None if that is documented."""
    arguments = lay_out(case, folder)
    before = _snapshot(folder)
    answer = worker.ask(arguments)
    return answer.get("code"), _fault(answer, case, before, folder)


def _fault(answer: dict[str, Any], case: Case, before: dict[str, bytes | str], folder: Path) -> str | None:
    for ended in ("signal", "hang"):
        if ended in answer:
            return f"{ended}: {answer[ended]}"
    if answer["escaped"]:
        return f"escaped: {answer['escaped']}"
    if answer["code"] not in ALLOWED:
        return f"exit {answer['code']}: {answer['err'][:300]}"
    if "Traceback" in answer["err"] + answer["out"]:
        return f"traceback: {answer['err'][:300]}"
    if answer["code"] not in (0, 1) and not answer["err"].strip():
        return f"exit {answer['code']} without a word"
    if answer["grown"] > GROWTH:
        return f"memory: {answer['grown'] >> 20} MiB"
    after = _snapshot(folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    rubble = changed - (set(case.outputs) if answer["code"] in (0, 1) else set())
    return f"left behind after exit {answer['code']}: {sorted(rubble)}" if rubble else None


def _snapshot(folder: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for root, names, files in os.walk(folder):
        for name in (*names, *files):
            path = Path(root, name)
            key = path.relative_to(folder).as_posix()
            found[key] = "link" if path.is_symlink() else "folder" if path.is_dir() else path.read_bytes()
    return found
