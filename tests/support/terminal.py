"""The command line on a terminal of its own: a pseudo-terminal, in one process for any number of commands."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

# Reads commands, a line each, runs them, and ends each with its exit code between two bells.
_LOOP = """
import shlex, sys
from localattn.cli import main
from localattn.commands.parts.console import Verbosity
for line in sys.stdin:
    sys.argv, code = shlex.split(line), 0
    Verbosity.quiet = False
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    print(f"\\a{int(code)}\\a", flush=True)
"""
# What moves the cursor, colours and clears.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A process whose stdout and stderr are one terminal.

    Args:
        folder: its current folder.
        piped: stdout is a pipe instead, and only stderr the terminal.
    """

    def __init__(self, folder: Path, *, piped: bool = False) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "XDG_CACHE_HOME": str(folder / "cache")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if piped else slave,
            stderr=slave,
            cwd=folder,
            env=environment,
        )
        os.close(slave)

    def run(self, line: str) -> tuple[int, str]:
        """Type a command; its exit code and all that the terminal showed, without colours.

        The command is taken apart as a POSIX shell would.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{shlex.join(shlex.split(line))}\n".encode())
        self._process.stdin.flush()
        shown = b""
        while (ended := re.search(rb"\a(\d+)\a", shown)) is None:
            shown += os.read(self._master if self._process.stdout is None else self._process.stdout.fileno(), 1 << 16)
        return int(ended[1]), _CONTROL.sub("", shown[: ended.start()].decode())

    def remarks(self) -> str:
        """What the terminal showed of a process whose stdout is a pipe."""
        return _CONTROL.sub("", os.read(self._master, 1 << 20).decode())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        os.close(self._master)


def following(shown: str) -> str:
    """The command that the last line of a result says to type next."""
    (line,) = re.findall(r"^Next: (.*?)\s*\Z", shown, re.MULTILINE)
    return str(line)
