"""End a text at a string, as the stop strings of transformers do.

A string counts where it ends in the newest token, wherever it began, in the prompt too (`StopStringCriteria` of
transformers 5.24). Texts are compared as bytes, because a token may end within a character.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import ArrayLike

from ...core.error_texts import shown
from ...core.errors import UsageError
from .fields import FIELDS


class StopStrings:
    """Find strings that end a text, in a batch of texts.

    Args:
        strings: one, or several.
        text_of: returns the text of a token, in UTF-8.

    Raises:
        UsageError: there is no string, or an empty one.
    """

    def __init__(self, strings: str | Iterable[str], text_of: Callable[[int], bytes]) -> None:
        listed = [strings] if isinstance(strings, str) else list(strings)
        wrong = FIELDS["stop_strings"].wrong(listed) if listed else "At least one is needed."
        if wrong:
            raise UsageError(f"stop_strings is {shown(strings)}.", why=wrong)
        self._strings = [text.encode("utf-8", "surrogatepass") for text in listed]
        self._text_of = text_of
        self._longest = max(map(len, self._strings))
        self._ends: list[bytes] = []

    def begin(self, prompt: ArrayLike, batch: int) -> None:
        """Begin after a prompt, `[B, T]`, or `[T]` for each of `batch` rows."""
        rows = np.broadcast_to(prompt, (batch, np.shape(prompt)[-1]))[:, -self._longest :]
        self._ends = [self._end(b"".join(self._text_of(int(token)) for token in row)) for row in rows]

    def add(self, row: int, token: int) -> bool:
        """Add a token to a row's text, and return whether a string ends in it."""
        before = self._ends[row]
        whole = before + self._text_of(token)
        self._ends[row] = self._end(whole)
        return any(whole.find(text, max(0, len(before) - len(text) + 1)) >= 0 for text in self._strings)

    def _end(self, text: bytes) -> bytes:
        """Return the end of a text that is long enough to contain the beginning of a string."""
        return text[max(0, len(text) - self._longest + 1) :]
