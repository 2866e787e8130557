"""Count the inputs of a comparison, and describe them in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from ...core.tensors import TensorSpec
from .rows import count_tokens
from .tokens import Tokens


class Tally:
    """Rows and tokens that were compared.

    Args:
        tokens: where the tokens come from; None for inputs of floats.
    """

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens
        self._counts: dict[bool, list[int]] = {}

    def add(self, arrays: Mapping[str, NDArray[Any]], specs: Sequence[TensorSpec], *, random: bool) -> None:
        """Count the inputs of a call.

        Args:
            arrays: the inputs.
            specs: of the inputs.
            random: whether their tokens are random, and so unrealistic.
        """
        found = self._counts.setdefault(random, [0, 0])
        for place, number in enumerate(count_tokens(arrays, specs)):
            found[place] += number

    def describe(self) -> str:
        """Describe the counted inputs in words, with remarks on the tokenizer."""
        if self._tokens is None:
            return "random inputs"
        told = [self._tokens.describe(*self._counts[False])] if False in self._counts else []
        rows, count = self._counts.get(True, (0, 0))
        told += [f"{rows} row{'s' * (rows != 1)} of random tokens, {count:,} tokens"] if rows else []
        return " and ".join(told) + "".join(f"; {note}" for note in self._tokens.notes)
