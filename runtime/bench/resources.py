"""Read the system's figures on this process and machine: resident memory, and use of the processors.

Everything here reads Linux' `/proc`; elsewhere the answers are None.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path

from ...core.documents.bench_report import Machine

_STATUS, _STAT, _CPU_INFO = Path("/proc/self/status"), Path("/proc/stat"), Path("/proc/cpuinfo")
_CLEAR = Path("/proc/self/clear_refs")


def resident() -> int | None:
    """Return the bytes of this process that are in memory now."""
    return _status("VmRSS")


def forget_peak() -> None:
    """Reset the peak that `peak_resident` returns, where the system allows it."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")


def peak_resident() -> int | None:
    """Return the peak of resident bytes since `forget_peak`.

    `ru_maxrss` cannot be used: a child process inherits its parent's.
    """
    return _status("VmHWM")


def _status(field: str) -> int | None:
    """Return a size of this process in bytes, which its status states in kB."""
    found = _value(_STATUS, field)
    return None if found is None else int(found.split()[0]) * 1024


def _value(path: Path, *names: str) -> str | None:
    """Return the value of the first line `NAME: value` with one of these names; None if there is none."""
    if not path.exists():
        return None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return None


class OthersMeter:
    """Measure the share of the processors that other processes, or a hypervisor, use from now on."""

    def __init__(self) -> None:
        self._begin, self._busy, self._own = time.perf_counter(), _machine_busy(), time.process_time()

    def share(self) -> float | None:
        """Return the share so far, from 0 to 1; None if the system does not report it."""
        busy = _machine_busy()
        if busy is None or self._busy is None:
            return None
        available = (time.perf_counter() - self._begin) * (os.cpu_count() or 1)
        others = (busy - self._busy) - (time.process_time() - self._own)
        return min(1.0, max(0.0, others / available)) if available > 0 else None


def _machine_busy() -> float | None:
    """Return the seconds that all processors together have worked, including time stolen by a hypervisor."""
    if not _STAT.exists():
        return None
    with _STAT.open(encoding="ascii") as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    user, nice, system, _idle, _wait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def machine() -> Machine:
    """Describe the machine of the measurement."""
    return Machine(
        cpu=_value(_CPU_INFO, "model name", "Model Name", "Model") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        architecture=platform.machine(),
        system=platform.system(),
        python=platform.python_version(),
    )
