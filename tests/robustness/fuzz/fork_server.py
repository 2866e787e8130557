"""Commands in processes of their own that cost no start of Python: a server that has imported the packages forks them.

Each runs as a user's command does, with a process that answers for it (`commands/supervisor`), in a session of its own,
with bounded memory, and with streams that are files. It may be asked to end by a signal at any moment.

    python -m tests.robustness.fuzz.fork_server     # answers requests, one JSON line each
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from localattn import _answer_quietly
from localattn.commands.supervisor import descendants

from .worker import status_bytes

_LONGEST_TEXT = 4000
_POLL = 0.002


def _waited(process: int) -> float:
    """Seconds in which a process was ready and other processes ran instead; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _of_session(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _, _, belongs = path.read_text().rpartition(")")[2].split()[:4]
            if int(belongs) == session and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def _left(session: int) -> list[int]:
    """The living processes of a session, and those that left it and were adopted by this process."""
    for number in (adopted := descendants.children()):
        with contextlib.suppress(OSError):
            os.waitpid(number, os.WNOHANG)
    return sorted({*_of_session(session), *(adopted & descendants.children())})


def _command(request: dict[str, Any], out: int, err: int) -> None:
    """In the forked process: run the command, and end."""
    code = 99
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        _answer_quietly()  # as `localattn.__main__` does first; what is before it here is Python's own start
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, stream in ((0, nothing), (1, out), (2, err)):
            os.dup2(stream, descriptor)
        os.chdir(request["folder"])
        for name, value in request["environment"].items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        tempfile.tempdir = None
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (min(hard, status_bytes("VmSize") + request["room"]), hard))
        sys.argv = ["localattn", *request["arguments"]]
        from localattn import cli

        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, f"Traceback: {type(error).__name__}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run one command; how it ended, as the worker says it, and how long it took to end when asked to."""
    before = status_bytes("VmRSS")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = os.fork()
        if process == 0:
            _command(request, out.fileno(), err.fileno())
        begun = time.monotonic()
        waiting = list(request["signals"])
        asked: float | None = None
        waited = 0.0
        hang = False
        while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            now = time.monotonic() - begun
            if waiting and now >= waiting[0][1]:
                number, _, group = waiting.pop(0)
                if asked is None:
                    asked, waited = time.monotonic(), _waited(process) + _waited(os.getpid())
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if group else os.kill)(process, number)
            if now > request["limit"]:
                hang = True
                os.killpg(process, signal.SIGKILL)
                break
            time.sleep(_POLL)
        took = time.monotonic() - asked if asked is not None else 0.0
        # What both this process and that one waited for a processor is not the command's.
        took -= _waited(process) + _waited(os.getpid()) - waited if asked is not None else 0.0
        _, status, usage = os.wait4(process, 0)
        left = _left(process)
        if left:  # what was killed may not be gone yet
            time.sleep(0.3)
            left = _left(process)
        for number in left:
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        texts = {}
        for name, stream in (("out", out), ("err", err)):
            stream.seek(0)
            texts[name] = stream.read().decode("utf-8", "backslashreplace")
    code = os.waitstatus_to_exitcode(status)
    if hang or usage.ru_utime + usage.ru_stime > request["seconds"]:
        return {"hang": " ".join(request["arguments"])}
    if code < 0:
        return {"signal": signal.Signals(-code).name}
    return {
        "code": code,
        "out": texts["out"][-_LONGEST_TEXT:],
        "err": texts["err"][:_LONGEST_TEXT],
        "escaped": "",
        "grown": max(0, (usage.ru_maxrss << 10) - before),
        "processes": len(left),
        "asked": asked is not None,
        "took": max(0.0, took),
    }


def main() -> None:
    """Answer requests, one JSON line each, until stdin ends."""
    channel = os.fdopen(os.dup(1), "w")
    silent = os.open(os.devnull, os.O_RDWR)
    requests = os.fdopen(os.dup(0), "r")
    for descriptor in (0, 1, 2):
        os.dup2(silent, descriptor)

    from localattn import cli
    from localattn.core.machine import process
    from localattn.runtime.backends.openvino.package import PACKAGE

    process.without_telemetry()
    descendants.adopt_orphans()
    import numpy
    import onnx
    import onnxruntime
    import tokenizers
    import torch

    PACKAGE.require()
    assert cli and numpy and onnx and onnxruntime and tokenizers and torch
    if threading.active_count() != 1:
        raise RuntimeError("a package started a thread as it was imported: no process can be forked from here")
    for line in requests:
        channel.write(json.dumps(_answer(json.loads(line))) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
