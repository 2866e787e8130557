"""Choose the next token of every row of a batch, with a seeded draw."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...core.error_texts import argument
from ...core.errors import UsageError
from .processors import Processor, Surroundings, Text, make
from .sampling import Sampling, Tokens, check_finite


class Sampler:
    """Choose a token for every row of a batch, each row from its own random stream.

    Args:
        sampling: how to choose.
        seed: ≥ 0; the same seed and logits give the same tokens.
        rows: numbers of the rows. Row `r` draws from the `r`-th stream of the seed (`numpy.random.PCG64`), so that
            its tokens do not depend on the other rows.
        stop: tokens that end a text.
        max_tokens: most tokens after the prompt; None for any number.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        rows: range,
        *,
        stop: Collection[int] = (),
        max_tokens: int | None = None,
    ) -> None:
        if seed < 0:
            raise UsageError(f"{argument('seed')} is {seed}.", why="A seed must be 0 or more.")
        self.sampling, self._asked = sampling, sampling.asked
        streams = (np.random.SeedSequence(seed, spawn_key=(row,)) for row in rows)
        self._generators = [np.random.Generator(np.random.PCG64(stream)) for stream in streams]
        self._stop, self._max_tokens = frozenset(map(int, stop)), max_tokens
        self._rows: list[tuple[Text, list[Processor]]] = []

    def see(self, tokens: ArrayLike, vocabulary: int, mask: ArrayLike | None = None) -> None:
        """Begin after a prompt.

        Args:
            tokens: `[B, T]`, or `[T]` for every row.
            vocabulary: `V`.
            mask: as of the tokens, 0 for padding; None without padding.

        Raises:
            UsageError: a token that the settings name is outside the vocabulary.
        """
        if not self._asked:
            return
        around = Surroundings(vocabulary, self._stop, self._max_tokens)
        shape = (len(self._generators), np.shape(tokens)[-1])
        kept = np.ones(shape, np.bool_) if mask is None else np.broadcast_to(np.asarray(mask) != 0, shape)
        texts = [
            Text(prompt, int(row.argmax()) if row.size else 0)
            for prompt, row in zip(np.broadcast_to(tokens, shape), kept, strict=True)
        ]
        self._rows = [(text, make(self.sampling, text, around)) for text in texts]

    def choose(self, logits: NDArray[Any], ended: NDArray[np.bool_] | None = None) -> Tokens:
        """Choose the next token of every row.

        Args:
            logits: `[B, V]`.
            ended: `[B]`, rows whose token does not matter; it is then 0.

        Returns:
            `[B]`, int64.

        Raises:
            CheckFailed: the model's logits are not finite.
            UsageError: the settings leave no token.
        """
        if not self._rows and self._asked:
            self.see(np.zeros((len(logits), 0), np.int64), logits.shape[1])
        chosen = np.zeros(len(self._generators), np.int64)
        for row, generator in enumerate(self._generators):
            if ended is None or not ended[row]:
                scores = self.scores(row, logits[row])
                chosen[row] = self.sampling.choose(scores, generator.random())
                if self._rows:
                    self._rows[row][0].add(int(chosen[row]))
        return chosen

    def scores(self, row: int, logits: NDArray[Any]) -> NDArray[Any]:
        """Return the scores of a row's next token, `[V]`: its logits after the processors.

        Raises:
            CheckFailed: the model's logits are not finite.
            UsageError: the settings leave no token.
        """
        text, processors = self._rows[row] if self._rows else (None, [])
        if text is None or not processors:
            return logits
        if not self.sampling.remove_invalid_values:
            check_finite(logits.max())
        scores = logits.astype(np.float32) if logits.dtype == np.float16 else logits
        with np.errstate(all="ignore"):
            for process in processors:
                scores = process(text, scores)
        if not np.isfinite(scores.max()):
            raise UsageError(
                "No token can be chosen: the settings forbid all of them, or their scores are infinite.",
                why=f"Scores are changed by {', '.join(self._asked)}.",
                fix="Remove these settings from generation_config.json or from the arguments.",
            )
        return scores
