"""Open files from outside: regular files only, and read no more of them than needed.

A device never ends, and a FIFO waits for a writer. Both are refused before the first byte is read.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UsageError
from .nesting import check_nesting

_log = logging.getLogger(__name__)

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe (FIFO)"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading bytes, without waiting; links are followed.

    Raises:
        UsageError: it is a folder, a device, a pipe or a socket.
        OSError: it cannot be opened.
    """
    _refuse_special(path, os.stat(path).st_mode)  # opening some devices has effects  # noqa: PTH116
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _refuse_special(path, os.fstat(descriptor).st_mode)
    except UsageError:
        os.close(descriptor)
        raise
    _log.debug("reading %s", path)
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, most: int) -> bytes:
    """Read at most `most` + 1 bytes of a regular file.

    Raises:
        UsageError: it is not a regular file.
        OSError: it cannot be read.
    """
    with open_plain(path) as stream:
        return stream.read(most + 1)


def read_json(path: Path, most: int, fix: str) -> Any:
    """Read a JSON document in UTF-8, of at most `most` bytes, that nests no deeper than a configuration does.

    Args:
        path: the file.
        most: bytes, a multiple of 2²⁰.
        fix: what to do where it cannot be read.

    Raises:
        UsageError: it is not such a document.
    """
    try:
        raw = read_plain(path, most)
        if len(raw) > most:
            raise ValueError(f"it has more than {most >> 20} MiB")
        text = raw.decode("utf-8")
        check_nesting(text)
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise UsageError(f"{path} cannot be read.", why=f"{reason.rstrip('.')}.", fix=fix) from error


def check_plain(path: Path) -> None:
    """Refuse anything but a regular file; the code that opens a missing file reports it.

    Raises:
        UsageError: it is a folder, a device, a pipe or a socket.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    _refuse_special(path, mode)


def _refuse_special(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "not a regular file")
        raise UsageError(
            f"Cannot read {path}.",
            why=f"It is {kind}, not a file.",
            fix="Give a file in it." if stat.S_ISDIR(mode) else "Copy its contents into a file, and use that file.",
        )
