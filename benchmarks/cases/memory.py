"""Peak memory, measured in a process of its own.

Linux keeps each process's peak resident memory (`VmHWM`) and lets the process itself set it back to what
is resident now, by writing 5 to `/proc/self/clear_refs`. So the peak *of one call* is known: set back,
call, read. `ru_maxrss` would not do: a child inherits its parent's peak through fork.
"""

from __future__ import annotations

import ctypes
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..machine import ROOT

MIB = 1 << 20
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _status(field: str) -> int:
    """A field of this process's status, in bytes."""
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_of_process() -> int:
    """Bytes resident at the most since the process began (or since `peak_of_call` last began)."""
    return _status("VmHWM")


def anonymous() -> int:
    """Bytes resident now that are this process's own, not of a file that is mapped."""
    return _status("RssAnon")


def peak_of_step() -> int:
    """Bytes resident at the most since the last call of this function, or since the process began."""
    peak = peak_of_process()
    _CLEAR.write_text("5", encoding="ascii")
    return peak


def peak_of_call(run: Callable[[], object], times: int) -> int:
    """Bytes that calling `run` so many times makes resident at the peak, beyond what was resident before."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc still holds would hide part of the peak
    _CLEAR.write_text("5", encoding="ascii")
    before = _status("VmRSS")
    for _ in range(times):
        run()
    return max(0, peak_of_process() - before)


def leave_some_memory() -> None:
    """Let this process and its children fail before they take the last fifth of the machine's free memory."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            limit = int(line.split()[1]) * 1024 * 4 // 5
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def in_child(*arguments: str) -> dict[str, Any]:
    """What `benchmarks.child` reports from a fresh process, given these arguments.

    Raises:
        RuntimeError: the process failed; its last line of stderr says why.
    """
    command = [sys.executable, "-m", "benchmarks.child", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(f"{' '.join(arguments)}: {lines[-1]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
