"""The tokens a model has: told by its sidecar, and checked before a graph reads something else for one it has not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.errors import UsageError

if TYPE_CHECKING:
    from ...core.documents.sidecar import Sidecar


def vocabulary(facts: Sidecar | None) -> int | None:
    """One more than the largest token, where a sidecar tells; None without one, or for embeddings."""
    size = None if facts is None else facts.kwargs.get("num_tokens")
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def check_tokens(inputs: Mapping[str, Any], limit: int | None, source: str = "") -> None:
    """Refuse tokens outside the vocabulary.

    The graph would not: a negative index counts from the end of the embedding, a GPU may read zeros.

    Args:
        inputs: arrays; those of integers are tokens.
        limit: one more than the largest; None checks nothing.
        source: where they come from, for the error.

    Raises:
        UsageError: a token is none of the model's.
    """
    if limit is None:
        return
    of = f" of {source}" if source else ""
    for name, array in inputs.items():
        if array.dtype.kind in "iu" and array.size and not 0 <= array.min() <= array.max() < limit:
            raise UsageError(
                f"Input {name!r}{of} holds tokens outside the vocabulary.",
                why=f"They range from {array.min()} to {array.max()}; the model has {limit} tokens.",
                fix=f"Use tokens from 0 to {limit - 1}.",
            )
