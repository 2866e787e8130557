"""Make standard streams usable when they are closed, full, or unable to encode a sign.

stdout carries the result: where it cannot be written, that is an error (`OutputLost`). stderr carries remarks: where
they cannot be written, they are dropped and the exit code stays what it is. What is closed is treated as `/dev/null`.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from ...core.errors import MissingDependency

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Substitutes for signs of our output that an encoding lacks.
_SUBSTITUTES = {
    **{"✓": "+", "✗": "x", "·": "*", "×": "x", "…": "...", "−": "-", "–": "-", "→": "->"},
    **{"²": "^2", "³": "^3", "≤": "<=", "≥": ">=", "±": "+-", "µ": "u", "σ": "sigma", "§": "section "},
}
_ERRORS = "localattn.substitute"


class OutputLost(MissingDependency):
    """The result cannot be written to stdout."""


class ReaderGone(Exception):
    """The reader of stdout closed its end, as `head` does when it has enough."""


class _Result(io.FileIO):
    """Stream for stdout: a failed write raises an error of its own kind, which no other code handles."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write bytes.

        Raises:
            ReaderGone: nobody reads any more.
            OutputLost: the disk is full, or the device refuses.
        """
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise ReaderGone from error
        except OSError as error:
            raise OutputLost(
                "The result cannot be written to standard output.",
                why=f"{error.strerror or error}.",
                fix="Free space, or send the output elsewhere. Files that were already written are complete.",
            ) from error


class _Remarks(io.FileIO):
    """Stream for stderr: what cannot be written is dropped."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write bytes, or drop them."""
        size = memoryview(data).nbytes
        try:
            return super().write(data) or size
        except OSError:
            return size


def open_closed() -> None:
    """Open each standard stream that is closed on `/dev/null`."""
    for descriptor in (0, 1, 2):
        _open_if_closed(descriptor)


# The descriptor of the user's stderr; another one where descriptor 2 is for libraries alone.
_remarks = 2


def keep_remarks(descriptor: int) -> None:
    """Let `prepare` write Python's stderr to this descriptor."""
    global _remarks
    _remarks = descriptor


def prepare() -> None:
    """Make the three streams usable; streams that other code has replaced stay as they are."""
    codecs.register_error(_ERRORS, _substitute)
    open_closed()
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if _is_ours(sys.stdout, sys.__stdout__):
        sys.stdout = _wrapped(_Result(1, "w", closefd=False), sys.stdout)
        _made.append(sys.stdout)
    if _is_ours(sys.stderr, sys.__stderr__):
        sys.stderr = _wrapped(_Remarks(_remarks, "w", closefd=False), sys.stderr, write_through=True)
        _made.append(sys.stderr)


# The streams that `prepare` has put in place of Python's own.
_made: list[object] = []


def _is_ours(stream: object, first: object) -> bool:
    """Return whether a stream is Python's first one, or what `prepare` put in its place."""
    return stream is first or any(stream is made for made in _made)


def replaced() -> bool:
    """Return whether other code has replaced the standard streams."""
    return not (_is_ours(sys.stdout, sys.__stdout__) and _is_ours(sys.stderr, sys.__stderr__))


def discard_output() -> None:
    """Discard what is still to be written to stdout, so that the interpreter can end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _open_if_closed(descriptor: int) -> None:
    """Open a closed descriptor on `/dev/null`: the next file opened would get it, and all that is printed."""
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened == descriptor:
            os.set_inheritable(descriptor, True)
        else:
            os.dup2(opened, descriptor)
            os.close(opened)


def _wrapped(raw: io.FileIO, old: TextIO | None, *, write_through: bool = False) -> TextIO:
    """Make a text stream over `raw` in the encoding of the old one; UTF-8 where that was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if old is None else old.encoding,
        errors=_ERRORS,
        line_buffering=raw.isatty() or write_through,
        write_through=write_through,
    )


def _substitute(error: UnicodeError) -> tuple[str | bytes, int]:
    """Handle an encoding error: a similar sign, the byte of a file name that is no text, or an escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    sign = error.object[error.start]
    if "\udc80" <= sign <= "\udcff":  # a byte of a name, as Python keeps what it cannot decode
        return bytes([ord(sign) - 0xDC00]), error.start + 1
    return _SUBSTITUTES.get(sign) or sign.encode("ascii", "backslashreplace").decode(), error.start + 1
