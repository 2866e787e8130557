"""Write generated tokens: as text on a terminal, as bytes in a pipe, as numbers where a model has no bytes."""

from __future__ import annotations

import codecs
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ...runtime.generation.tokenizer import FolderTokenizer


class TokenWriter(Protocol):
    """Where the tokens of one sequence go, one at a time."""

    def write(self, token: int) -> None:
        """Write a token at once."""

    def end(self) -> None:
        """Write what is still held back: the sequence is over, or was interrupted."""


class TerminalText:
    """Writer of UTF-8 text on a terminal; control characters are shown as U+FFFD.

    A character appears when its last byte has arrived.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, token: int) -> None:
        """Decode a byte and show the character that it completes."""
        self._show(self._decoder.decode(bytes([token])))

    def end(self) -> None:
        """Show an unfinished character as U+FFFD, and end the line."""
        self._show(self._decoder.decode(b"", final=True) + "\n")

    @staticmethod
    def _show(text: str) -> None:
        if text:
            sys.stdout.write(printable(text))
            sys.stdout.flush()


class RawBytes:
    """Writer of the bytes themselves, for pipes and files."""

    def write(self, token: int) -> None:
        """Pass a byte on."""
        sys.stdout.buffer.write(bytes([token]))
        sys.stdout.buffer.flush()

    def end(self) -> None:
        """Add nothing: the output is the model's bytes and no other."""


class FolderText:
    """Writer of a tokenizer's text as it comes; on a terminal control characters are shown as U+FFFD.

    Args:
        tokenizer: of the model's folder.
    """

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        from ...runtime.generation.tokenizer import TextStream

        self._stream, self._terminal = TextStream(tokenizer), sys.stdout.isatty()

    def write(self, token: int) -> None:
        """Show what the token adds, up to its last whole character."""
        self._show(self._stream.add(token))

    def end(self) -> None:
        """Show an unfinished character as U+FFFD; end the line on a terminal."""
        self._show(self._stream.end() + ("\n" if self._terminal else ""))

    def _show(self, text: str) -> None:
        if not text:
            return
        if self._terminal:
            sys.stdout.write(printable(text))
            sys.stdout.flush()
        else:
            sys.stdout.buffer.write(text.encode("utf-8", "replace"))
            sys.stdout.buffer.flush()


class Numbers:
    """Writer of tokens as numbers, `1,2,3` and a line end, as `--prompt-ids` reads them."""

    def __init__(self) -> None:
        self._separator = ""

    def write(self, token: int) -> None:
        """Show a number."""
        sys.stdout.write(f"{self._separator}{token}")
        sys.stdout.flush()
        self._separator = ","

    def end(self) -> None:
        """End the line."""
        sys.stdout.write("\n")
        sys.stdout.flush()


def writer_for(*, bytes_model: bool, tokenizer: FolderTokenizer | None = None) -> TokenWriter:
    """Choose the writer that suits this model, its tokenizer and stdout."""
    if tokenizer is not None:
        return FolderText(tokenizer)
    if not bytes_model:
        return Numbers()
    return TerminalText() if sys.stdout.isatty() else RawBytes()


def printable(text: str) -> str:
    """Replace the control characters of a text, except tab and line feed."""
    return "".join(c if c in "\t\n" or not ("\x7f" <= c <= "\x9f" or c < " ") else "�" for c in text)
