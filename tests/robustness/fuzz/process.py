"""Running a case in a process of its own, whose streams may be closed, full, or read by nobody."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from .case import Streams
from .runner import MOST_SECONDS, confine
from .seeds import ROOT

_CLONE_NEWUSER = 0x10000000
_NOBODY = 54321  # a user id that no user has


def _become_nobody() -> None:
    """Have another user id, and still the rights of this user on its files."""
    mapped = f"{_NOBODY} {os.geteuid()} 1"
    if ctypes.CDLL(None).unshare(_CLONE_NEWUSER) == 0:
        Path("/proc/self/uid_map").write_text(mapped)


def run_process(arguments: list[str], folder: Path, environment: dict[str, str], streams: Streams) -> dict[str, Any]:
    """How the command ended, as the worker says it; what it wrote to a pipe is read as bytes of any encoding."""

    def prepare() -> None:
        confine()
        if streams.nobody:
            _become_nobody()
        for descriptor, kind in ((1, streams.out), (2, streams.err)):
            if kind == "closed":
                os.close(descriptor)

    opened: list[int] = []

    def target(kind: str, stream: Any) -> Any:
        if kind == "full":
            opened.append(os.open("/dev/full", os.O_WRONLY))
        elif kind == "early":
            reader, writer = os.pipe()
            os.close(reader)
            opened.append(writer)
        else:
            return stream
        return opened[-1]

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "cli.py"), *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=target(streams.out, out),
            stderr=target(streams.err, err),
            preexec_fn=prepare,
        )
        for descriptor in opened:
            os.close(descriptor)
        killed = threading.Event()
        timer = threading.Timer(MOST_SECONDS, lambda: (killed.set(), process.kill()))
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = code = os.waitstatus_to_exitcode(status)
        texts = {}
        for name, stream in (("out", out), ("err", err)):
            stream.seek(0)
            texts[name] = stream.read(4000).decode("latin-1").replace("\0", "")
    if killed.is_set():
        return {"hang": " ".join(arguments)}
    if code < 0:
        return {"signal": signal.Signals(-code).name}
    return {"code": code, **texts, "escaped": "", "grown": usage.ru_maxrss << 10}
