"""The process that meets the inputs: it runs commands one after another and answers how each ended.

It is a process of its own because native code may crash in it, hang, or take all memory: `python -m
tests.robustness.fuzz.worker`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch


def status_bytes(name: str) -> int:
    """A size in `/proc/self/status`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _text(stream: io.TextIOWrapper) -> str:
    """What was written; strict UTF-8, as a terminal's stream is."""
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


@contextmanager
def _surroundings(folder: str, environment: dict[str, str | None], room: int) -> Iterator[None]:
    """The folder, the variables and the memory of a case, which is `room` beyond what is mapped."""
    before = dict(os.environ)
    here = Path.cwd()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (min(hard, status_bytes("VmSize") + room), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _hurried(asked: bool) -> Iterator[None]:
    """Give servers a second to begin and half of one to end, where they have minutes."""
    if not asked:
        yield
        return
    from localattn.runtime.bundle import bounded_http, open_inference

    with (
        patch.object(bounded_http, "TRANSFER", 0.5),
        patch.object(open_inference, "_ABOUT", 1.0),
        patch.object(open_inference.Server.__init__, "__defaults__", (1.0,)),
    ):
        yield


def main() -> None:
    """Answer requests, one JSON line each, until stdin ends."""
    channel = os.fdopen(os.dup(1), "w")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)  # native code that prints must not break the lines
    os.dup2(silent, 2)

    from localattn import cli
    from localattn.commands.parts.console import Verbosity

    for line in sys.stdin:
        request = json.loads(line)
        Verbosity.verbose = Verbosity.quiet = False
        sys.argv = ["localattn", *request["arguments"]]
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        _forget_peak()
        before = status_bytes("VmHWM")
        code, escaped = 0, ""
        begun = time.monotonic()
        with (
            _hurried(request["hurried"]),
            _surroundings(request["folder"], request["environment"], request["room"]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                cli.main()
            except SystemExit as exit_:
                code = exit_.code if isinstance(exit_.code, int) else 1
            except BaseException as error:
                escaped = f"{type(error).__name__}: {error}"
        answer = {
            "code": code,
            "out": _text(out)[-4000:],
            "err": _text(err)[:4000],
            "escaped": escaped[:2000],
            "clock": time.monotonic() - begun,
            "grown": status_bytes("VmHWM") - before,
        }
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
