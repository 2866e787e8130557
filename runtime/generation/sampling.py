"""Choose the next token from logits, as transformers' `generate` does; `sampler.py` does it for a batch.

    l = logits after the processors of the settings (`processors.py`): penalties, biases, forbidden tokens
    p = softmax(l / temperature), of which only some tokens stay (`truncation.py`): top_h, top_k, top_p, min_p, …

One uniform number for each token then chooses among these, their probabilities renormalised. Temperature 0 is
greedy: the largest score, the lowest id among equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.error_texts import argument, shown
from ...core.errors import CheckFailed, UsageError
from .fields import DRAWS, FIELDS, SCORES
from .truncation import WARPERS

Probabilities = NDArray[np.float64]
Tokens = NDArray[np.int64]
# Arguments that are also options; others are named as in generation_config.json.
_OPTIONS = ("temperature", "top_k", "top_p", "repetition_penalty")


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing a token, named as in transformers' `GenerationConfig`; None has no effect.

    Args:
        temperature: ≥ 0; divides the scores; 0 is greedy, and the settings from here to `eta_cutoff` have no effect.
        top_k: keep this many of the likeliest tokens, ≥ 1, and those that are as likely as the last.
        top_p: keep the likeliest tokens that together reach this, in (0, 1].
        repetition_penalty: 1e-6 … 1e6; above 1 makes tokens of the prompt and of the text less probable.
        min_p: keep tokens that are at least this share as likely as the likeliest.
        top_h: keep the likeliest tokens up to this share of the entropy.
        typical_p: keep the most typical tokens that together reach this.
        epsilon_cutoff: keep tokens of at least this probability.
        eta_cutoff: keep tokens of at least this probability, or of less where many are likely.
        sequence_bias: pairs of a sequence of tokens and what is added to the score of its last token.
        encoder_repetition_penalty: above 1 makes tokens of the prompt more probable.
        no_repeat_ngram_size: no sequence of this many tokens occurs twice.
        encoder_no_repeat_ngram_size: no sequence of this many tokens of the prompt is repeated.
        bad_words_ids: sequences of tokens that never come.
        min_length: tokens of prompt and text before the end may come.
        min_new_tokens: tokens of the text before the end may come; counts more than `min_length`.
        forced_bos_token_id: the token after a prompt of one token.
        forced_eos_token_id: the last token of a text whose length is limited, or several to choose from.
        remove_invalid_values: NaN and infinite scores are not an error.
        exponential_decay_length_penalty: a number of tokens and a factor; after so many the end becomes likelier by
            the factor with each token.
        suppress_tokens: tokens that never come.
        begin_suppress_tokens: tokens that do not come first.

    Raises:
        UsageError: a value of another type, or outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    min_p: float | None = None
    top_h: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    sequence_bias: Sequence[tuple[Sequence[int], float]] | None = None
    encoder_repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    remove_invalid_values: bool | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in (*SCORES, *DRAWS):
            value, field = getattr(self, name), FIELDS[name]
            if value is None and name in ("temperature", "repetition_penalty"):
                object.__setattr__(self, name, 1.0)
            elif wrong := field.wrong(value):
                known = argument(name) if name in _OPTIONS else name
                raise UsageError(f"{known} is {shown(value)}.", why=wrong)

    @property
    def asked(self) -> tuple[str, ...]:
        """Arguments that change scores by the text so far, and not only the draw."""
        return tuple(name for name in SCORES if FIELDS[name].asks(getattr(self, name)))

    def choose(self, logits: NDArray[Any], uniform: float) -> int:
        """Return the token for a number in [0, 1): the first whose cumulative probability exceeds it.

        Raises:
            CheckFailed: as `kept`.
        """
        tokens, weights = self.kept(logits)
        cumulated = weights.cumsum()
        # The weights need not sum to 1: the number is scaled to their sum. A token of weight 0 is never chosen.
        return int(tokens[cumulated.searchsorted(uniform * cumulated[-1], side="right")])

    def kept(self, logits: NDArray[Any]) -> tuple[Tokens, Probabilities]:
        """Return the tokens that are kept, ascending, and their weights, proportional to their probabilities.

        Args:
            logits: `[V]`, after the processors.

        Raises:
            CheckFailed: the logits hold NaN or +Inf, or nothing but -Inf.
        """
        logits = logits.astype(np.float64)
        likeliest = logits.argmax()  # argmax returns a NaN if there is one
        largest = logits[likeliest]
        check_finite(largest)
        if self.temperature == 0:
            return np.array([likeliest]), np.ones(1)
        with np.errstate(over="ignore"):  # from a very small temperature
            scores = (logits - largest) / self.temperature
        tokens = np.arange(len(scores))
        for name, keep, does in WARPERS:
            value = getattr(self, name)
            if value is not None and does(value):
                stay = keep(scores, value)
                tokens, scores = tokens[stay], scores[stay]
        return tokens, np.exp(scores)


def check_finite(largest: Any) -> None:
    """Refuse logits whose largest is NaN or infinite.

    Raises:
        CheckFailed: it is.
    """
    if not np.isfinite(largest):
        raise CheckFailed(
            "The model's logits are not finite.",
            why="No token can be chosen from NaN or infinite logits.",
            fix="Check the export with `localattn parity`; an fp16 file may overflow: export it in fp32.",
        )
