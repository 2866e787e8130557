"""Processes that run commands: the worker, which runs one case after another, and what each process may use."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .case import Request, of_others, snapshot
from .seeds import ROOT

SECONDS = 60.0  # of processor time in a worker; cases take milliseconds
MOST_SECONDS = 900.0  # by the clock: of a case that only waits, also on a machine that does much else
GROWTH = 1 << 30  # bytes of memory a case of a few kilobytes may take
# What a process may map; enough for torch, and far below what a lying header asks for.
ADDRESS_SPACE = 12 << 30
# What a case may map beyond what its process has mapped.
ROOM = 6 << 30
_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2


def confine() -> None:
    """In a child before its program starts: bound its memory; root obeys permissions, as every other user does."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)  # that of whoever started this, which may be lower
    space = ADDRESS_SPACE if most == resource.RLIM_INFINITY else min(ADDRESS_SPACE, most)
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.geteuid() == 0:
        for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
            ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def _processor_seconds(process: int) -> float:
    """Processor time of a process and of its children that have ended (proc(5), fields 14 to 17 of `stat`)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Worker:
    """A worker process that is started again when a case ended it, with a home and a cache of its own.

    Args:
        starts: how often it was started.
        last: how the last command ended.
    """

    starts: int = 0
    last: dict[str, Any] = field(default_factory=dict, repr=False)
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)
    _forks: subprocess.Popen[str] | None = field(default=None, repr=False)
    _home: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="localattn-home-")))

    def __post_init__(self) -> None:
        for name in ("home", "cache", "tmp"):
            (self._home / name).mkdir()

    def environment(self, variables: Mapping[str, str | None]) -> dict[str, str]:
        """The variables of this process, with a home, a cache and a temporary folder that are the worker's."""
        own = {"HOME": "home", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
        found: dict[str, str | None] = {
            **os.environ,
            **{name: str(self._home / own[name]) for name in own},
            **variables,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _started(self, module: str) -> subprocess.Popen[str]:
        """A process that answers requests."""
        return subprocess.Popen(
            [sys.executable, "-m", f"tests.robustness.fuzz.{module}"],
            cwd=ROOT,
            env=self.environment({}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=confine,
        )

    def fork(
        self,
        arguments: list[str],
        folder: Path,
        variables: Mapping[str, str | None],
        requests: Sequence[Request] = (),
    ) -> dict[str, Any]:
        """How the command ended, in a process of its own that was forked where all packages are imported.

        Args:
            arguments: of the command line.
            folder: where it runs.
            variables: to set, or with None to remove.
            requests: signals that it gets.
        """
        if self._forks is None:
            self._forks = self._started("fork_server")
        assert self._forks.stdin is not None and self._forks.stdout is not None
        request = {
            "arguments": arguments,
            "folder": str(folder),
            "environment": {**self.environment(variables), **variables},
            "signals": [[each.number, each.after, each.group] for each in requests],
            "limit": MOST_SECONDS,
            "seconds": SECONDS,
            "room": ROOM,
        }
        self._forks.stdin.write(json.dumps(request) + "\n")
        self._forks.stdin.flush()
        line = self._forks.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of forks has ended with {self._forks.wait()}")
        return dict(json.loads(line))

    def ask(
        self,
        arguments: list[str],
        folder: Path,
        variables: Mapping[str, str | None],
        *,
        hurried: bool = False,
    ) -> dict[str, Any]:
        """How the command ended, run in `folder`; `signal` or `hang` instead where it did not.

        Args:
            arguments: of the command line.
            folder: where it runs.
            variables: to set, or with None to remove.
            hurried: give servers a second, where they have minutes.
        """
        if self._process is None:
            self.starts += 1
            self._process = self._started("worker")
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        request = {
            "arguments": arguments,
            "folder": str(folder),
            "environment": dict(variables),
            "hurried": hurried,
            "room": ROOM,
        }
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        ready = self._answered(process)
        line = process.stdout.readline() if ready else ""
        if line:
            return dict(json.loads(line))
        if not ready:
            process.kill()
        code = process.wait()
        self._process = None
        if not ready:
            return {"hang": " ".join(arguments)}
        return {"signal": signal.Signals(-code).name if code < 0 else f"exit {code}"}

    def _answered(self, process: subprocess.Popen[str]) -> bool:
        """Wait for the answer of a worker; return False when it has used all its time."""
        assert process.stdout is not None
        end, most = time.monotonic() + MOST_SECONDS, _processor_seconds(process.pid) + SECONDS
        while time.monotonic() < end and _processor_seconds(process.pid) < most:
            if select.select([process.stdout], [], [], 1.0)[0]:
                return True
        return False

    def strays(self) -> list[str]:
        """What commands left in the home and the temporary folder; they are empty again afterwards."""
        found = []
        for place in (self._home / "home", self._home / "tmp"):
            names = snapshot(place)
            found += [f"{place.name}/{name}" for name in sorted(names.keys() - of_others(names))]
            if names:
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir(exist_ok=True)
        return found

    def close(self) -> None:
        for process in (self._process, self._forks):
            if process is not None:
                assert process.stdin is not None
                process.stdin.close()
                process.wait()
        self._process = self._forks = None
        with contextlib.suppress(OSError):
            shutil.rmtree(self._home)
