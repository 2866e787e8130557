"""`localattn generate` on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

COMMAND = [sys.executable, "-m", "localattn.cli", "generate"]


def hears_ctrl_c():
    """A test run in the background ignores SIGINT, and so would the commands it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The command on a pseudo-terminal, and what it has shown."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"}
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
            env=environment,
            preexec_fn=hears_ctrl_c,
        )
        os.close(slave)
        self.shown = b""

    def read_until(self, enough, seconds=60):
        end = time.monotonic() + seconds
        while not enough(self.shown) and time.monotonic() < end:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.master, 65536)
                except OSError:  # the other side is closed
                    break
            elif self.process.poll() is not None:
                break
        return self.shown

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        os.close(self.master)

    def type(self, text):
        os.write(self.master, text.encode())
