"""Choose the tokens of a comparison: text through a tokenizer, text as bytes, or tokens drawn by rank.

Models are trained on text that begins with certain tokens, and their first token often has activations thousands of
times larger than any other (X. Sun et al., Massive Activations in Large Language Models, 2024). Tokens drawn evenly
from a vocabulary of 262,144 next to never have it. So rows here begin as texts of the model begin, and go on as text
does; where there is no text, tokens are drawn by rank, with the weight 1 / (id + 10), because vocabularies are
mostly sorted by frequency (G. K. Zipf, Human Behavior and the Principle of Least Effort, 1949).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import LocalAttnError, MissingDependency
from ...core.text.read import Part, Passage, passages
from ..generation.tokenizer import TOKENIZER, FolderTokenizer
from .folder import SpecialTokens, of_config, of_folder

Ids = NDArray[np.int64]

# A vocabulary of bytes.
_BYTES = 256
_RANK_OFFSET = 10
_BETWEEN = "\n\n"
# The most tokens tried as openings, and the most messages of a chat.
_MOST_OPENINGS = 8
# Special tokens that pad a batch, and those inside a text.
_PADDING, _INSIDE = "pad_token", ("mask_token", "sep_token")
# If a larger share of a tokenizer's tokens is outside the vocabulary, it belongs to another model.
_MOST_BEYOND = 0.1
# A larger share of one token means that the tokenizer does not know most of the text.
_MOST_ALIKE = 0.5
# A tokenizer of another language cuts the text into characters and bytes: fewer of its tokens are longer than one. Its
# own words are then drawn by rank, this many.
_FEWEST_WORDS, _OWN = 0.25, 160
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Opening:
    """Tokens that a sequence may begin with.

    Args:
        name: what reports call it.
        ids: the tokens.
    """

    name: str
    ids: tuple[int, ...]


class Tokens(ABC):
    """A source of rows of tokens.

    Args:
        limit: one more than the largest token of the model.

    Attributes:
        is_text: whether the rows are text.
        opening: the special token that begins a row, as text or number; "" if there is none.
        openings: other ways in which a sequence may begin.
        pad: the token that fills a batch.
        left: batches are filled on the left.
        why_no_text: why the rows are not text; "" if they are.
        notes: what the user should know of the tokenizer.
    """

    is_text = True
    opening = ""
    openings: Sequence[Opening] = ()
    pad = 0
    left = False
    why_no_text = ""
    notes: Sequence[str] = ()

    def __init__(self, limit: int) -> None:
        self.limit = limit

    @property
    @abstractmethod
    def kinds(self) -> int:
        """How many different beginnings a row may have: passages of text, or draws."""

    @abstractmethod
    def row(self, start: int, length: int, opening: Opening | None = None, pieces: int = 1) -> Ids:
        """Return a row of `length` tokens.

        Args:
            start: which passage the row begins with, or a seed.
            length: how many tokens.
            opening: the beginning of the row, instead of the usual one.
            pieces: how many different passages the row has at least, spread over all.
        """

    @property
    def kind(self) -> str:
        """A description of the rows in words."""
        return "text" if self.is_text else "tokens drawn by rank"

    def describe(self, rows: int, tokens: int) -> str:
        """Describe inputs in words: number of rows and tokens, and their beginning."""
        first = f", {self.opening} first" if self.opening else ""
        why = f" ({self.why_no_text})" if self.why_no_text else ""
        return f"{rows} row{'s' * (rows != 1)} of {self.kind}, {tokens:,} tokens{first}{why}"


class TextTokens(Tokens):
    """Text through the tokenizer of a folder.

    Args:
        tokenizer: of the folder.
        special: what the folder says of special tokens.
        limit: as of `Tokens`.
        part: which text, or its passages.
        chat: the text of a conversation, as the model's template writes it; "" without one.
    """

    def __init__(
        self,
        tokenizer: FolderTokenizer,
        special: SpecialTokens,
        limit: int,
        part: Part | tuple[Passage, ...] = "judgement",
        chat: str = "",
    ) -> None:
        super().__init__(limit)
        self._tokenizer, self._special = tokenizer, special
        self._passages = _passages(part)
        self._before, self._after = self._added()
        self.left, self.notes = special.left, list(special.notes)
        self.opening = (tokenizer.name(self._before[0]) or str(self._before[0])) if self._before else ""
        self.pad = self._padding()
        own = self._own_words()
        if own:
            self.notes.append("the tokenizer knows few words of the text, so a row begins with words of its own")
        self.openings = [*own, *self._openings(chat)]
        beyond, count = self.beyond
        if beyond:
            self.notes.append(
                f"{beyond:,} of {count:,} tokens of the text are outside the model's vocabulary and are skipped"
            )

    @property
    def kinds(self) -> int:
        """Return the number of passages."""
        return len(self._passages)

    @cached_property
    def _pieces(self) -> list[Ids]:
        """The tokens of each passage, without tokens outside the model's vocabulary."""
        return [ids[ids < self.limit] for ids in self._all_pieces]

    @cached_property
    def _all_pieces(self) -> list[Ids]:
        texts = [passage.text + _BETWEEN for passage in self._passages]
        return [np.array(self._tokenizer.encode(text, special=False), np.int64) for text in texts]

    @property
    def beyond(self) -> tuple[int, int]:
        """How many tokens of the text are outside the model's vocabulary, and how many the text has."""
        whole = np.concatenate(self._all_pieces)
        return int((whole >= self.limit).sum()), whole.size

    @property
    def commonest(self) -> float:
        """The share of the text's tokens that are the most frequent one."""
        whole = np.concatenate(self._pieces)
        return float(np.bincount(whole).max() / whole.size) if whole.size else 1.0

    def row(self, start: int, length: int, opening: Opening | None = None, pieces: int = 1) -> Ids:
        """Return a row of text with the tokenizer's additions; a cut row keeps those at the end."""
        before = list(self._before if opening is None else opening.ids)
        after = list(self._after) if length > len(before) + len(self._after) else []
        room = max(0, length - len(before) - len(after))
        inner = _joined(self._pieces, start, room, pieces)
        return np.array([*before, *inner, *after], np.int64)[:length]

    def _added(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the tokenizer puts before and after a text."""
        word = "a"
        plain, whole = self._tokenizer.encode(word, special=False), self._tokenizer.encode(word)
        place = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None) if plain else None
        before, after = ([], []) if place is None else (whole[:place], whole[place + len(plain) :])
        for text in reversed(self._special.adds_first):
            known = self._tokenizer.token(text)
            before = before if known is None or known in before[:1] else [known, *before]
        for text in self._special.adds_last:
            known = self._tokenizer.token(text)
            after = after if known is None or known in after[-1:] else [*after, known]
        return [x for x in before if x < self.limit], [x for x in after if x < self.limit]

    def _padding(self) -> int:
        named = [self._tokenizer.token(text) for text in self._special.texts.get("pad_token", ())]
        stated = [*named, *self._special.ids.get("pad_token", ()), *self._special.ids.get("eos_token", ())]
        return next((token for token in stated if token is not None and token < self.limit), 0)

    def _own_words(self) -> list[Opening]:
        """Return an opening of the tokenizer's own words, if the text has few words that it knows."""
        used, counts = np.unique(np.concatenate(self._pieces), return_counts=True)
        if not used.size or counts[self._are_words(used)].sum() >= _FEWEST_WORDS * counts.sum():
            return []
        others = np.setdiff1d(np.arange(min(self.limit, self._tokenizer.size)), used)
        words = others[self._are_words(others)]
        if not words.size:
            return []
        weights = 1.0 / (np.arange(words.size) + _RANK_OFFSET)
        drawn = np.random.default_rng(0).choice(words, _OWN, p=weights / weights.sum())
        return [Opening("words of its tokenizer first", (*self._before, *map(int, drawn)))]

    def _are_words(self, ids: Ids) -> NDArray[np.bool_]:
        """Return which tokens are longer than one character; special ones and parts of a character are not."""
        texts = self._tokenizer.decode_all(*ids[:, None].tolist()) if ids.size else []
        inside = (text.replace(_NO_CHARACTER, "").strip().removeprefix("##") for text in texts)
        return np.array([len(text) > 1 for text in inside], np.bool_)

    def _openings(self, chat: str) -> list[Opening]:
        """List other ways to begin: a chat, the tokens of its template, and every other special token."""
        found = []
        if chat:
            ids = tuple(x for x in self._tokenizer.encode(chat, special=False) if x < self.limit)
            found.append(Opening("a chat", ids))
        special = self._special
        named = {name: [self._tokenizer.token(text) for text in texts] for name, texts in special.texts.items()}
        named = {"chat": [self._tokenizer.token(text) for text in self._of_the_chat()], **named}
        for name in special.ids:
            named[name] = [*named.get(name, ()), *special.ids[name]]
        known = set(self._before[:1])
        for name, token in ((x, token) for x, tokens in named.items() for token in tokens if token is not None):
            if token not in known and name != _PADDING and 0 <= token < self.limit:
                found.append(_opening(self._tokenizer.name(token), token, name, self._before))
                known.add(token)
        return found[: _MOST_OPENINGS + 1]

    def _of_the_chat(self) -> list[str]:
        """List the special tokens that the chat template names."""
        return [text for text in self._tokenizer.special_tokens() if text in self._special.template]


class ByteTokens(Tokens):
    """Text as UTF-8 bytes, for a model with 256 tokens."""

    def __init__(self, part: Part | tuple[Passage, ...] = "judgement") -> None:
        super().__init__(_BYTES)
        self._pieces = [
            np.frombuffer((passage.text + _BETWEEN).encode(), np.uint8).astype(np.int64) for passage in _passages(part)
        ]

    @property
    def kinds(self) -> int:
        """Return the number of passages."""
        return len(self._pieces)

    def row(self, start: int, length: int, opening: Opening | None = None, pieces: int = 1) -> Ids:
        """Return a row of text; its passages follow one another as in the file."""
        before = np.array([] if opening is None else opening.ids, np.int64)
        inner = _joined(self._pieces, start, max(0, length - before.size), pieces)
        return np.concatenate([before, inner])[:length]


class DrawnTokens(Tokens):
    """Tokens drawn by rank, after an opening token.

    Args:
        limit: as of `Tokens`.
        special: the special tokens of the configuration.
        why_no_text: why there is no text.
    """

    is_text = False

    def __init__(self, limit: int, special: SpecialTokens, why_no_text: str = "") -> None:
        super().__init__(limit)
        self.why_no_text, self.left = why_no_text, special.left
        fronts = {
            token: name
            for name in ("sep_token", "mask_token", "eos_token", "decoder_start_token", "cls_token", "bos_token")
            for token in reversed(special.ids.get(name, ()))  # the first one stated comes last, and begins the row
            if token < limit
        }
        token, name = list(fronts.items())[-1] if fronts else (-1, "")
        self._front = Opening(f"{name}_id {token}", (token,)) if fronts else Opening("", ())
        self.opening = self._front.name
        others = [(name, token) for token, name in reversed(fronts.items()) if (token,) != self._front.ids]
        self.openings = [_opening(f"{name}_id {token}", token, name, self._front.ids) for name, token in others]
        self.openings = self.openings[:_MOST_OPENINGS]
        stated = (*special.ids.get("pad_token", ()), *special.ids.get("eos_token", ()), 0)
        self.pad = next((token for token in stated if token < limit), 0)
        # The whole of a vocabulary as a running sum; every draw is then one search.
        self._sums = np.cumsum(1.0 / (np.arange(limit) + _RANK_OFFSET))

    @property
    def kinds(self) -> int:
        """Return the number of different draws, which is unlimited."""
        return 1 << 16

    def row(self, start: int, length: int, opening: Opening | None = None, pieces: int = 1) -> Ids:
        """Return a row of drawn tokens, the same for the same start."""
        before = np.array((self._front if opening is None else opening).ids, np.int64)
        drawn = np.random.default_rng(start).random(max(0, length - before.size)) * self._sums[-1]
        inner = np.minimum(np.searchsorted(self._sums, drawn, side="right"), self.limit - 1)
        return np.concatenate([before, inner.astype(np.int64)])[:length]


def _passages(part: Part | tuple[Passage, ...]) -> tuple[Passage, ...]:
    return passages(part) if isinstance(part, str) else part


def _opening(text: str | None, token: int, name: str, before: Sequence[int]) -> Opening:
    """Return an opening with a special token; a token for the inside of a text follows the usual opening."""
    inside = name in _INSIDE
    ids = (*before, token) if inside else (token,)
    return Opening(f"{text or token} {'second' if inside and before else 'first'}", ids)


def _joined(pieces: Sequence[Ids], start: int, length: int, spread: int) -> Ids:
    """Join passages to a length: from the first on, or a number of them, spread evenly and cut to equal shares."""
    if not any(piece.size for piece in pieces):
        return np.zeros(0, np.int64)
    count, found, size, place = len(pieces), [], 0, start
    step, share = (1, length) if spread == 1 else (max(1, count // spread), -(-length // spread))
    while size < length:
        piece = pieces[place % count][: min(share, length - size)]
        found.append(piece)
        size, place = size + piece.size, place + step
        if (place - start) % count < step and step > 1:  # all shares are used: continue with the passages between them
            place += 1
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def open_tokens(
    folders: Sequence[Path],
    limit: int | None,
    config: Mapping[str, Any] | None = None,
    part: Part | tuple[Passage, ...] = "judgement",
) -> Tokens | None:
    """Return the best source of tokens for a model: text if possible.

    Args:
        folders: folders that may contain a tokenizer, best first.
        limit: one more than the largest token of the model; None where no input is of tokens.
        config: its `config.json`, where it is known.
        part: which text, or its passages.

    Returns:
        None if the model has no token input.
    """
    if limit is None or limit < 1:
        return None
    why, special = "there is no tokenizer.json in the model's folder", of_config(config or {})
    for folder in folders:
        if not (folder / TOKENIZER).is_file():
            continue
        special = of_folder(folder, config)
        try:
            tokenizer = FolderTokenizer.open(folder)
            if tokenizer is None:
                continue
            found = TextTokens(tokenizer, special, limit, part, _chat(folder, tokenizer, special))
        except MissingDependency as error:
            why = f"the package tokenizers is not installed: {error.fix.partition(',')[0]}"
            continue
        except LocalAttnError as error:
            why = f"{TOKENIZER} is not used: {error.why or error.what}".rstrip(".")
            continue
        beyond, count = found.beyond
        if beyond > _MOST_BEYOND * count:
            why = f"{TOKENIZER} belongs to another model: {beyond:,} of {count:,} tokens are outside its vocabulary"
        elif found.commonest > _MOST_ALIKE:
            why = f"{TOKENIZER} knows too few words: {found.commonest:.0%} of the text become one token"
        else:
            return found
    if limit == _BYTES:
        return ByteTokens(part)
    special = next((stated for x in folders if (stated := of_folder(x, config)).ids), special)
    return DrawnTokens(limit, special, why)


def _chat(folder: Path, tokenizer: FolderTokenizer, special: SpecialTokens) -> str:
    """Return a conversation formatted by the folder's template, "" without a usable template."""
    from ..generation.chat import render_chat
    from ..generation.defaults import read_defaults

    if not special.template:
        return ""
    message = {"role": "user", "content": "Why do tides come twice a day? Answer in one sentence."}
    try:
        return render_chat(read_defaults(folder, tokenizer), [message])
    except LocalAttnError:
        return ""  # its special tokens are still among the openings
