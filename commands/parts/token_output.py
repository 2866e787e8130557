"""Write generated tokens: as text on a terminal, as bytes in a pipe, as numbers where a model has no bytes."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from ...core.spelling import steerless

if TYPE_CHECKING:
    from ...runtime.generation.tokenizer import FolderTokenizer


@dataclass(frozen=True)
class TokenWriter:
    """Writer of the tokens of one sequence, each as soon as it is known.

    Bytes go out as they are; on a terminal, what would steer it is shown as U+FFFD.

    Args:
        add: returns what a token adds; a text gets a character when its last byte has arrived.
        rest: returns what is still held back when the sequence is over, or was interrupted.
        ends_line: whether a line end follows the last token.
    """

    add: Callable[[int], str | bytes]
    rest: Callable[[], str | bytes]
    ends_line: bool

    def write(self, token: int) -> None:
        """Write a token."""
        _show(self.add(token))

    def end(self) -> None:
        """Write the rest and the line end."""
        _show(self.rest())
        _show("\n" if self.ends_line else "")


def writer_for(*, bytes_model: bool, tokenizer: FolderTokenizer | None = None) -> TokenWriter:
    """Choose the writer that suits this model, its tokenizer and stdout."""
    terminal = sys.stdout.isatty()
    if tokenizer is not None:
        from ...runtime.generation.tokenizer import TextStream

        stream = TextStream(tokenizer)
        return TokenWriter(stream.add, stream.end, ends_line=terminal)
    if not bytes_model:
        return _numbers()
    return _decoded_bytes() if terminal or _bytes_out() is None else _raw_bytes()


def _numbers() -> TokenWriter:
    """Write tokens as numbers with commas between them, as `--prompt-ids` reads them."""
    separator = ""

    def add(token: int) -> str:
        nonlocal separator
        text, separator = f"{separator}{token}", ","
        return text

    return TokenWriter(add, rest=lambda: "", ends_line=True)


def _raw_bytes() -> TokenWriter:
    """Write the model's bytes, and no other."""
    return TokenWriter(lambda token: bytes([token]), rest=lambda: b"", ends_line=False)


def _decoded_bytes() -> TokenWriter:
    """Write the text that the model's bytes are in UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return TokenWriter(
        lambda token: decoder.decode(bytes([token])), rest=lambda: decoder.decode(b"", final=True), ends_line=True
    )


def _show(shown: str | bytes) -> None:
    """Write a text or bytes to stdout at once."""
    out = _bytes_out()
    if isinstance(shown, str) and (out is None or sys.stdout.isatty()):
        sys.stdout.write(printable(shown) if sys.stdout.isatty() else shown)
        sys.stdout.flush()
    elif shown and out is not None:
        out.write(shown.encode("utf-8", "replace") if isinstance(shown, str) else shown)
        out.flush()


def _bytes_out() -> BinaryIO | None:
    """Return the stream below stdout that takes bytes; None where stdout is text alone, as in a notebook."""
    return getattr(sys.stdout, "buffer", None)


def printable(text: str) -> str:
    """Replace control characters except tab and line feed, and marks that change the direction of writing."""
    return steerless(text)
