"""Find and end the processes that a dead command has left; on Linux, where orphans can be adopted."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Become the parent of the processes whose parent dies, as far as they descend from this one."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """End this process at once when its parent, of this number, is gone: killed by SIGKILL, for example."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # gone before the request
            os._exit(1)
        return
    import threading

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def children() -> set[int]:
    """Return the numbers of the children of this process; none where the system does not tell."""
    me = os.getpid()
    try:
        return set(map(int, Path(f"/proc/{me}/task/{me}/children").read_text().split()))
    except (OSError, ValueError):
        return set()


def end_children(spared: set[int], seconds: float = 1.0) -> None:
    """Kill the children of this process, and theirs as they are adopted.

    Args:
        spared: children that this process had before the command.
        seconds: how long to go on; a process within a call of the system ends when the call does.
    """
    end = time.monotonic() + seconds
    while (left := children() - spared) and time.monotonic() < end:
        for number in left:
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.005)
        for number in left:
            with contextlib.suppress(OSError):
                os.waitpid(number, os.WNOHANG)


def _prctl(option: int, value: int) -> None:
    """Call prctl(2); nothing on systems without it."""
    if sys.platform != "linux":
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
