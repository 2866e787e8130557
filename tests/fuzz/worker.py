"""The process that meets the inputs: it runs commands one after another and tells how each ended.

It is a process of its own because native code may crash in it, hang, or take all memory: `python -m tests.fuzz.worker`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
from pathlib import Path

# What a case may map; enough for torch, and far below what a lying header asks for.
ADDRESS_SPACE = 12 << 30


def _peak_bytes() -> int:
    """The largest resident size since `_forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _text(stream: io.TextIOWrapper) -> str:
    """What was written; strict UTF-8, as a terminal's stream is."""
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


def main() -> None:
    """Answer requests, one JSON line each, until stdin ends."""
    channel = os.fdopen(os.dup(1), "w")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)  # native code that prints must not break the lines
    os.dup2(silent, 2)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    from localattn import cli
    from localattn.commands.console import Verbosity

    for line in sys.stdin:
        arguments = json.loads(line)
        Verbosity.verbose = Verbosity.quiet = False
        sys.argv = ["localattn", *arguments]
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        _forget_peak()
        before = _peak_bytes()
        code, escaped = 0, ""
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
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
            "grown": _peak_bytes() - before,
        }
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
