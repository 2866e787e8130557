"""Write generated tokens: as text on a terminal, as bytes in a pipe, as numbers where a model has no bytes."""

from __future__ import annotations

import codecs
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...runtime.generation.tokenizer import FolderTokenizer


@dataclass(frozen=True)
class TokenWriter:
    """Writer of the tokens of one sequence, each at once; control characters on a terminal are shown as U+FFFD.

    Args:
        add: returns what a token adds; text has a character when its last byte has arrived.
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
        """Write what is still held back."""
        _show(self.rest())
        _show("\n" if self.ends_line else "")


def writer_for(*, bytes_model: bool, tokenizer: FolderTokenizer | None = None) -> TokenWriter:
    """Choose the writer that suits this model, its tokenizer and stdout."""
    terminal = sys.stdout.isatty()
    if tokenizer is not None:
        from ...runtime.generation.tokenizer import TextStream

        stream = TextStream(tokenizer)
        return TokenWriter(stream.add, stream.end, terminal)
    if not bytes_model:  # numbers, as `--prompt-ids` reads them
        separators = itertools.chain([""], itertools.repeat(","))
        return TokenWriter(lambda token: f"{next(separators)}{token}", str, True)
    if not terminal:  # the output is the model's bytes and no other
        return TokenWriter(lambda token: bytes([token]), bytes, False)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return TokenWriter(lambda token: decoder.decode(bytes([token])), lambda: decoder.decode(b"", final=True), True)


def _show(shown: str | bytes) -> None:
    if isinstance(shown, str) and sys.stdout.isatty():
        sys.stdout.write(printable(shown))
        sys.stdout.flush()
    elif shown:
        sys.stdout.buffer.write(shown.encode("utf-8", "replace") if isinstance(shown, str) else shown)
        sys.stdout.buffer.flush()


def printable(text: str) -> str:
    """Replace the control characters of a text, except tab and line feed."""
    return "".join(c if c in "\t\n" or not ("\x7f" <= c <= "\x9f" or c < " ") else "�" for c in text)
