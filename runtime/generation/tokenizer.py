"""The tokenizer in the folder of a step file: text to tokens, and tokens to text as they come.

It is Hugging Face's `tokenizer.json`, read by the package `tokenizers`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import MissingDependency, UsageError
from ...core.storage.reading import read_plain

TOKENIZER = "tokenizer.json"
# The largest known ones, with 262,144 tokens, have 33 MB.
_MOST_BYTES = 128 << 20
# How many times longer replacements may make a text: a few kilobytes could ask for more memory than there is.
_MOST_GROWTH = 1024
# What a decoder writes for bytes that are no whole character.
_UNFINISHED = "�"
# A character of UTF-8 has four bytes at most; more tokens without a whole one are no text, and are shown as they are.
_MOST_HELD = 8


class FolderTokenizer:
    """Text to tokens, and back.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, folder: Path) -> FolderTokenizer | None:
        """Open the tokenizer of a folder; None where there is none.

        Raises:
            UsageError: the file is broken, too large, or its replacements make texts too long.
            MissingDependency: the package `tokenizers` is not installed.
        """
        path = folder / TOKENIZER
        if not path.is_file():
            return None
        try:
            raw = read_plain(path, _MOST_BYTES)
        except OSError as error:
            raise UsageError(f"Cannot read {path}.", why=error.strerror or str(error)) from error
        if len(raw) > _MOST_BYTES:
            raise UsageError(f"{path} is no tokenizer.", why=f"It has more than {_MOST_BYTES >> 20} MiB.")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingDependency(
                f"{path} needs the package tokenizers.",
                why="It turns text into the model's tokens.",
                fix="pip install 'localattn[transformers]', or give numbers with --prompt-ids",
            ) from error
        try:
            found = Tokenizer.from_str(raw.decode("utf-8"))
            # As transformers does: what is stored about batches for training cuts or pads no prompt.
            found.no_truncation()
            found.no_padding()
            steps = [json.loads(part.__getstate__()) for part in (found.normalizer, found.decoder) if part is not None]
        except BaseException as error:  # a panic of its Rust code is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"{path} cannot be read.", why=f"{reason}.", fix="Copy the original again.") from error
        if max(map(_growth, steps), default=1) > _MOST_GROWTH:
            why = f"Its replacements may make a text over {_MOST_GROWTH} times longer."
            raise UsageError(f"{path} is not used.", why=why, fix="Copy the original again.")
        return cls(found)

    @property
    def size(self) -> int:
        """Number of tokens, those that were added included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: any text.
            special: add the tokens that begin and end a text, as far as the tokenizer has such; a chat has its own.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def token(self, text: str) -> int | None:
        """Return the number of a token by its name, `<eos>` for example."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def spelled(self, token: int) -> str | None:
        """Return the name of a token, special ones included; None for a number that is none."""
        found: str | None = self._tokenizer.id_to_token(token)
        return found

    def special_tokens(self) -> list[str]:
        """List the names of the tokens that were added as special ones."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]


def _growth(step: Mapping[str, Any]) -> int:
    """Return how many times longer a normalizer or decoder may make a text, by its replacements one after the other."""
    found = 1
    for inner in (*step.get("normalizers", ()), *step.get("decoders", ())):
        found = min(found * _growth(inner), _MOST_GROWTH + 1)
    if step.get("type") == "Replace":
        content, pattern = step.get("content", ""), step.get("pattern", {}).get("String")
        # A regular expression may match the place between two characters.
        found = len(content) + 1 if pattern is None else max(1, -(-len(content) // max(1, len(pattern))))
    return found


class TextStream:
    """Text that grows token by token: each call returns what the new token adds.

    A character whose bytes are spread over tokens is held back until the last of them. What a token reads as depends
    on its neighbours (a space before a word, for example), so new tokens are decoded together with the last ones that
    were shown.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = self._before = 0  # tokens that were shown, and those that are decoded with new ones no more

    def add(self, token: int) -> str:
        """Return the text that a token adds; empty while a character is unfinished."""
        self._tokens.append(token)
        return self._new(final=len(self._tokens) - self._shown >= _MOST_HELD)

    def end(self) -> str:
        """Return what is still held back, with U+FFFD for what never became a character."""
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        whole = self._tokenizer.decode(self._tokens[self._before :])
        if whole.endswith(_UNFINISHED) and not final:
            return ""
        known = self._tokenizer.decode(self._tokens[self._before : self._shown])
        if len(whole) <= len(known) and not final:
            return ""  # a special token, or one that shows with the next
        self._before, self._shown = self._shown, len(self._tokens)
        # Only what lies before is forgotten, so that this list stays short in an endless text.
        del self._tokens[: self._before]
        self._shown, self._before = self._shown - self._before, 0
        return whole[len(known) :]
