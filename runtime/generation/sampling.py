"""Choose the next token from logits: repetition penalty, temperature, top-k, top-p, and a seeded draw.

    l = logit / penalty if that is positive, else logit · penalty, of tokens that came before; else logit
    p = softmax(l / temperature), of which only
        the `top_k` most probable tokens stay (ties: the lower id), then of these
        the fewest, most probable first, that together reach `top_p`

One uniform number for each token then chooses among these, their probabilities renormalised. Temperature 0 is
greedy: the largest logit, the lowest id among equals.
Sources: Fan et al., arXiv 1805.04833 (top-k); Holtzman et al., arXiv 1904.09751 (top-p); Keskar et al.,
arXiv 1909.05858 (penalty).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.error_texts import argument
from ...core.errors import CheckFailed, UsageError

Probabilities = NDArray[np.float64]
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """How to choose a token.

    Args:
        temperature: ≥ 0; divides the logits; 0 is greedy, and top_k and top_p have no effect.
        top_k: keep this many tokens, ≥ 1; None keeps all.
        top_p: keep the most probable tokens that together reach this, in (0, 1]; None keeps all.
        repetition_penalty: > 0; above 1 makes tokens of the prompt and of the text less probable, 1 does nothing.

    Raises:
        UsageError: a value outside these ranges.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        top_k, top_p = self.top_k, self.top_p
        for name, fits, why, fix in (
            ("temperature", 0 <= self.temperature < np.inf, "It divides the logits.", "Take 0 (greedy) or more."),
            ("top_k", top_k is None or top_k >= 1, "At least one token must stay.", "Take 1 or more."),
            ("top_p", top_p is None or 0 < top_p <= 1, "It is a probability.", "Take more than 0, at most 1."),
            ("repetition_penalty", 0 < self.repetition_penalty < np.inf, "", "Take 1 (none), or 1.1."),
        ):
            if not fits:
                raise UsageError(f"{argument(name)} is {getattr(self, name)}.", why=why, fix=fix)

    def penalised(self, logits: NDArray[Any], seen: NDArray[np.bool_]) -> NDArray[Any]:
        """Return logits after the penalty for tokens that were seen, bool of the same shape."""
        lowered = np.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
        return np.where(seen, lowered, logits)

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

        Raises:
            CheckFailed: the logits, `[V]`, hold NaN or +Inf, or nothing but -Inf.
        """
        logits = logits.astype(np.float64)
        likeliest = logits.argmax()  # argmax returns a NaN if there is one
        largest = logits[likeliest]
        if not np.isfinite(largest):
            raise CheckFailed(
                "The model's logits are not finite.",
                why="No token can be chosen from NaN or infinite logits.",
                fix="Check the export with `localattn parity`; an fp16 file may have overflowed: export it in fp32.",
            )
        if self.temperature == 0:
            return np.array([likeliest]), np.ones(1)
        if self.top_k is None or self.top_k >= len(logits):
            tokens = np.arange(len(logits))
        else:
            tokens = _largest(logits, self.top_k)
            logits = logits[tokens]
        weights = np.exp((logits - largest) / self.temperature)
        if self.top_p is not None and self.top_p < 1:
            nucleus = _nucleus(weights / weights.sum(), self.top_p)
            tokens, weights = tokens[nucleus], weights[nucleus]
        return tokens, weights


class Sampler:
    """Chooses a token for every row of a batch, each row from a random stream of its own.

    Args:
        sampling: how to choose.
        seed: ≥ 0; the same seed and logits give the same tokens.
        rows: numbers of the rows. Row `r` draws from the `r`-th stream of the seed (`numpy.random.PCG64`), so that
            what it draws does not depend on the rows beside it.
    """

    def __init__(self, sampling: Sampling, seed: int, rows: range) -> None:
        if seed < 0:
            raise UsageError(f"{argument('seed')} is {seed}.", why="Seeds are not negative.")
        self.sampling = sampling
        streams = (np.random.SeedSequence(seed, spawn_key=(row,)) for row in rows)
        self._generators = [np.random.Generator(np.random.PCG64(stream)) for stream in streams]
        self._seen: NDArray[np.bool_] | None = None

    def see(self, tokens: Tokens, vocabulary: int) -> None:
        """Note tokens that came before, `[B, T]` or `[T]` for every row, for the repetition penalty."""
        if self.sampling.repetition_penalty == 1:
            return
        if self._seen is None:
            self._seen = np.zeros((len(self._generators), vocabulary), np.bool_)
        for row, seen in zip(np.broadcast_to(tokens, (len(self._seen), np.shape(tokens)[-1])), self._seen, strict=True):
            seen[row] = True

    def choose(self, logits: NDArray[Any]) -> Tokens:
        """Choose the next token of every row, `[B, V]` → `[B]` int64."""
        if self._seen is not None:
            logits = self.sampling.penalised(logits, self._seen)
        rows = zip(logits, self._generators, strict=True)
        chosen = np.array([self.sampling.choose(row, generator.random()) for row, generator in rows], dtype=np.int64)
        if self._seen is not None:
            self.see(chosen[:, None], self._seen.shape[1])
        return chosen


def _largest(logits: Probabilities, count: int) -> Tokens:
    """Return the indices of the `count` largest values, ascending; among equals the first ones."""
    last = np.partition(logits, -count)[-count]
    kept = np.flatnonzero(logits >= last)
    if len(kept) > count:
        ties = kept[logits[kept] == last]
        kept = np.setdiff1d(kept, ties[count - len(kept) :], assume_unique=True)
    return kept


def _nucleus(probabilities: Probabilities, reach: float) -> Tokens:
    """Return the indices of the fewest largest values that sum to `reach`, ascending; among equals the first ones."""
    # All values below (1 - reach) / V together are less than what may be left out, so they need not be sorted.
    candidates = np.flatnonzero(probabilities >= (1 - reach) / len(probabilities))
    order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
    reached = probabilities[order].cumsum()
    return np.sort(order[: int(reached[:-1].searchsorted(reach)) + 1])
