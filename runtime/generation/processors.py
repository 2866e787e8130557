"""Change scores before a token is chosen, as the logits processors of transformers do.

Each is made once for a row of the batch, from `Sampling`, and gets the row's text and its scores `[V]`. They work in
the scores' element type, as those of transformers do, and in its order (`_get_logits_processor` of release 5.24); the
naive forms that they are tested against are its classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...core.errors import UsageError
from .sampling import Sampling, Tokens

Scores: TypeAlias = "NDArray[np.floating[Any]]"
Processor: TypeAlias = "Callable[[Text, Scores], Scores]"


class Text:
    """The tokens of one row: its prompt, and what followed.

    Args:
        prompt: `[T]`.
        padding: how many tokens at its beginning are padding.

    Attributes:
        prompt_length: `T`.
        padding: as given.
    """

    def __init__(self, prompt: Tokens, padding: int = 0) -> None:
        self.prompt_length, self.padding = len(prompt), padding
        self._tokens = np.empty(max(64, 2 * len(prompt)), np.int64)
        self._tokens[: len(prompt)] = prompt
        self._length = len(prompt)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Tokens:
        """All tokens so far."""
        return self._tokens[: self._length]

    @property
    def prompt(self) -> Tokens:
        """The prompt, with its padding."""
        return self._tokens[: self.prompt_length]

    def add(self, token: int) -> None:
        """Add a token that was chosen."""
        if self._length == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[self._length] = token
        self._length += 1


@dataclass(frozen=True)
class Surroundings:
    """The data of processors in addition to the settings.

    Args:
        vocabulary: `V`.
        stop: tokens that end a text.
        max_tokens: most tokens after the prompt; None for any number.
    """

    vocabulary: int
    stop: Collection[int] = ()
    max_tokens: int | None = None


def make(sampling: Sampling, text: Text, around: Surroundings) -> list[Processor]:
    """Make the processors for these settings, for one row.

    Raises:
        UsageError: a token that they name is outside the vocabulary, or a length penalty has no token to act on.
    """
    made = (maker(sampling, text, around) for maker in _IN_ORDER)
    return [processor for processor in made if processor is not None]


def _biased(pairs: list[tuple[tuple[int, ...], float]], name: str, around: Surroundings) -> Processor:
    """Add a bias to the last token of a sequence if the text ends with the tokens before it.

    Source: `SequenceBiasLogitsProcessor`. Sequences of one length are compared with the text at once.
    """
    largest = max(max(sequence) for sequence, _ in pairs)
    _check_rows(name, [largest], around)
    single = np.zeros(around.vocabulary, np.float32)
    groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for sequence, bias in dict(pairs).items():
        if len(sequence) == 1:
            single[sequence[0]] = bias
        else:
            groups.setdefault(len(sequence) - 1, []).append((sequence, bias))
    longer = [
        (
            np.array([sequence[:-1] for sequence, _ in group]),
            np.array([sequence[-1] for sequence, _ in group]),
            np.array([bias for _, bias in group], np.float32),
        )
        for group in groups.values()
    ]

    def process(text: Text, scores: Scores) -> Scores:
        bias = single.astype(scores.dtype)
        for before, last, values in longer:
            length = before.shape[1]
            if length <= len(text):
                matching = (before == text.tokens[-length:]).all(axis=1)
                np.add.at(bias, last[matching], values[matching])
        return scores + bias

    return process


def _sequence_bias(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    if sampling.sequence_bias is None:
        return None
    pairs = [(tuple(sequence), float(bias)) for sequence, bias in sampling.sequence_bias]
    return _biased(pairs, "sequence_bias", around)


def _bad_words(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    """Source: `NoBadWordsLogitsProcessor`; a token that ends a text is never a bad word alone."""
    ends = {(token,) for token in around.stop}
    words = [(tuple(word), -np.inf) for word in sampling.bad_words_ids or () if tuple(word) not in ends]
    return _biased(words, "bad_words_ids", around) if words else None


def _penalty(penalty: float, first: int, last: int | None, vocabulary: int) -> Processor:
    """Divide positive scores of the tokens `[first, last)` of a text by a penalty, and multiply the others.

    Source: Keskar et al., arXiv 1909.05858; `RepetitionPenaltyLogitsProcessor`.
    """
    seen = np.zeros(vocabulary, np.bool_)
    known = first

    def process(text: Text, scores: Scores) -> Scores:
        nonlocal known
        new = text.tokens[known:last]
        seen[new[(new >= 0) & (new < vocabulary)]] = True
        known += len(new)
        return np.where(seen, np.where(scores < 0, scores * penalty, scores / penalty), scores)

    return process


def _encoder_repetition_penalty(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    """Make tokens of the prompt likelier. A decoder's prompt counts as what its encoder read, as in transformers."""
    value = sampling.encoder_repetition_penalty
    if value in (None, 1):
        return None
    return _penalty(1 / float(value), 0, text.prompt_length, around.vocabulary)


def _repetition_penalty(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    """Penalise earlier tokens; padding before a prompt does not count."""
    value = sampling.repetition_penalty
    return None if value == 1 else _penalty(float(value), text.padding, None, around.vocabulary)


def _after(source: Tokens, text: Tokens, size: int) -> Tokens:
    """Return the tokens that follow, in a source, the last `size - 1` tokens of a text."""
    ends = np.arange(size - 1, len(source))  # where a sequence of this size ends in the source
    for back in range(1, size):
        ends = ends[source[ends - back] == text[-back]]
        if not len(ends):
            break
    return source[ends]


def _forbid_after(size: int, last: int | None) -> Processor:
    """Forbid tokens that would repeat `size` tokens of the text up to `last`.

    Source: `NoRepeatNGramLogitsProcessor`, `EncoderNoRepeatNGramLogitsProcessor`.
    """

    def process(text: Text, scores: Scores) -> Scores:
        if len(text) < size:
            return scores
        return _forbidden(scores, _after(text.tokens[:last], text.tokens, size))

    return process


def _no_repeat(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    size = sampling.no_repeat_ngram_size
    return _forbid_after(int(size), None) if size else None


def _encoder_no_repeat(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    size = sampling.encoder_no_repeat_ngram_size
    return _forbid_after(int(size), text.prompt_length) if size else None


def _min_length(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    """Forbid the end before a minimum length; a minimum of new tokens goes before one that includes the prompt."""
    least = int(sampling.min_length or 0)
    if sampling.min_new_tokens is not None:
        least = int(sampling.min_new_tokens) + text.prompt_length
    if least <= 0 or not around.stop:
        return None
    stop = np.array(sorted(around.stop))
    return lambda text, scores: _forbidden(scores, stop) if len(text) < least else scores


def _forced_bos(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    """Force a token after a prompt of one token."""
    token = sampling.forced_bos_token_id
    if token is None:
        return None
    _check_rows("forced_bos_token_id", [int(token)], around)
    return lambda text, scores: _only(scores, [int(token)]) if len(text) == 1 else scores


def _forced_eos(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    """Force tokens at the last position of a text with limited length."""
    found = sampling.forced_eos_token_id
    if found is None or around.max_tokens is None:
        return None
    tokens = [int(token) for token in found] if isinstance(found, Sequence) else [int(found)]
    _check_rows("forced_eos_token_id", tokens, around)
    last = text.prompt_length + around.max_tokens - 1
    return lambda text, scores: _only(scores, tokens) if len(text) == last else scores


def _finite(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    """Replace NaN by 0, and infinities by the largest numbers."""
    if sampling.remove_invalid_values is not True:
        return None

    def process(text: Text, scores: Scores) -> Scores:
        limits = np.finfo(scores.dtype)
        return np.nan_to_num(scores, nan=0.0, posinf=limits.max, neginf=limits.min)

    return process


def _length_decay(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    """Raise the scores of the end, more with every token after a start.

    Source: `ExponentialDecayLengthPenalty`.
    """
    found = sampling.exponential_decay_length_penalty
    if found is None:
        return None
    stop = np.array(sorted(token for token in around.stop if token < around.vocabulary), np.int64)
    if not len(stop):
        raise UsageError(
            "exponential_decay_length_penalty cannot be applied.",
            why="It makes the end of a text likelier, but this model has no token that ends a text.",
            fix="Leave it out, or also give eos_token_id.",
        )
    start, factor = int(found[0]) + text.prompt_length, float(found[1])

    def process(text: Text, scores: Scores) -> Scores:
        if len(text) <= start:
            return scores
        old = scores[stop]
        largest = float(np.finfo(scores.dtype).max)
        raised = np.abs(old) * scores.dtype.type(min(np.float64(factor) ** (len(text) - start) - 1, largest))
        scores = scores.copy()
        scores[stop] = np.clip(old + np.where(np.isfinite(old), raised, 0), -np.inf, largest)
        return scores

    return process


def _suppressed(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    if sampling.suppress_tokens is None:
        return None
    tokens = np.unique(np.array(sampling.suppress_tokens, np.int64))
    return lambda text, scores: _forbidden(scores, tokens)


def _suppressed_first(sampling: Sampling, text: Text, around: Surroundings) -> Processor | None:
    """Forbid tokens at the first position after the prompt, or after a forced first token."""
    if sampling.begin_suppress_tokens is None:
        return None
    tokens = np.unique(np.array(sampling.begin_suppress_tokens, np.int64))
    forced = text.prompt_length <= 1 and sampling.forced_bos_token_id is not None
    place = text.prompt_length + int(forced)
    return lambda text, scores: _forbidden(scores, tokens) if len(text) == place else scores


_IN_ORDER: tuple[Callable[[Sampling, Text, Surroundings], Processor | None], ...] = (
    _sequence_bias,
    _encoder_repetition_penalty,
    _repetition_penalty,
    _no_repeat,
    _encoder_no_repeat,
    _bad_words,
    _min_length,
    _forced_bos,
    _forced_eos,
    _finite,
    _length_decay,
    _suppressed,
    _suppressed_first,
)


def _forbidden(scores: Scores, tokens: Tokens) -> Scores:
    """Return scores that exclude some tokens, and those outside the vocabulary."""
    found: Scores = scores.copy()
    found[tokens[(tokens >= 0) & (tokens < len(scores))]] = -np.inf
    return found


def _only(scores: Scores, tokens: list[int]) -> Scores:
    found: Scores = np.full_like(scores, -np.inf)
    found[tokens] = 0
    return found


def _check_rows(name: str, tokens: list[int], around: Surroundings) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        UsageError: one is outside the vocabulary.
    """
    outside = [token for token in tokens if token >= around.vocabulary]
    if outside:
        raise UsageError(
            f"{name} names the token {outside[0]}.",
            why=f"The model has {around.vocabulary} tokens.",
            fix=f"Use tokens from 0 to {around.vocabulary - 1}.",
        )
