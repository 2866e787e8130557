"""Show the stderr output of native libraries: line by line, marked, without control characters.

Libraries write names from a stranger's file as they are. So their lines begin with a bar, which no line of our own
does. What they print as they give up is kept for the error that tells of it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from ...core.spelling import spelled
from ..parts.console import FOREIGN

# Colours of a library's log are removed.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_BREAK = re.compile(rb"[\r\n]+")
_LONGEST_LINE = 4000
_MOST_KEPT = 200

# Messages of a library that ends the process; the error reports them.
_LAST_WORDS = re.compile(
    r"memory allocation of \d+ bytes failed|terminate called |  what\(\): |libc\+\+abi: |Fatal Python error: "
    r"|free\(\): |malloc\(\): |malloc_consolidate|double free |corrupted |munmap_chunk\(\)|realloc\(\): "
    r"|\*\*\* stack smashing|Segmentation fault|Aborted"
)
# A panic in Rust that became an exception, from its first line to the advice that ends it.
_PANIC = re.compile(r"\s*thread '.*' (?:\(\d+\) )?panicked at ")
# Lines of a panic with a backtrace, at most.
_LONGEST_PANIC = 400
_PANIC_ENDS = re.compile(
    r"note: run with `RUST_BACKTRACE|note: [sS]ome details are omitted|note: compile with|aborting\."
)


class NativeOutput:
    """The output of libraries, given to `show` line by line.

    Args:
        show: prints a line.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._rest = b""
        self._panic_lines = 0
        # Lines that are not shown unless details are asked for.
        self.kept: list[str] = []
        self._last: deque[str] = deque(maxlen=_MOST_KEPT)

    def feed(self, data: bytes) -> None:
        """Take bytes."""
        *lines, self._rest = _BREAK.split(self._rest + data)
        for line in lines:
            self._take(line)
        while len(self._rest) > _LONGEST_LINE:
            self._take(self._rest[:_LONGEST_LINE])
            self._rest = self._rest[_LONGEST_LINE:]

    def end(self) -> None:
        """Take the rest without a line end."""
        self._take(self._rest)
        self._rest = b""

    def last_lines(self) -> list[str]:
        """Return the lines that were printed last."""
        return list(self._last)

    def _take(self, line: bytes) -> None:
        text = spelled(_COLOUR.sub("", line.decode("utf-8", "backslashreplace")))
        if not text.strip():
            return
        self._last.append(text)
        if _PANIC.match(text):
            self._panic_lines = _LONGEST_PANIC
        if self._panic_lines or _LAST_WORDS.search(text):
            if len(self.kept) < _MOST_KEPT:
                self.kept.append(text)
            self._panic_lines = 0 if _PANIC_ENDS.search(text) else max(0, self._panic_lines - 1)
            return
        self._show(f"{FOREIGN}{text}")
