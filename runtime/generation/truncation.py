"""Keep some of the tokens before one is drawn, as the logits warpers of transformers do.

Each gets the scores of the tokens that are still there, divided by the temperature already, and says which stay. The
naive forms that they are tested against are the classes of transformers 5.24, whose order is that of `WARPERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Scores: TypeAlias = "NDArray[np.float64]"
# Indices, ascending, or a mask.
Kept: TypeAlias = "NDArray[Any]"

# `TopHLogitsWarper` considers this many of the likeliest tokens.
_TOP_H_LOOKS_AT = 100


def probabilities(scores: Scores) -> Scores:
    """Return the softmax of scores."""
    weights = np.exp(scores - scores.max())
    found: Scores = weights / weights.sum()
    return found


def _entropy(chances: Scores) -> float:
    some = chances[chances > 0]
    return float(-(some * np.log(some)).sum())


def top_h(scores: Scores, share: float) -> Kept:
    """Keep the likeliest tokens whose joint entropy is at most a share of the whole entropy (of the first hundred).

    Source: Potraghloo et al., arXiv 2509.02510.
    """
    order = np.argsort(-scores, kind="stable") if len(scores) <= _TOP_H_LOOKS_AT else _likeliest(scores)
    chances = probabilities(scores[order])
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(chances > 0, -chances * np.log(chances), 0)
    reached = terms.cumsum()
    keep = (reached <= reached[-1] * share) & (chances > 0)
    keep[0] = True
    return np.sort(order[keep])


def _likeliest(scores: Scores) -> NDArray[np.int64]:
    found = np.argpartition(-scores, _TOP_H_LOOKS_AT - 1)[:_TOP_H_LOOKS_AT]
    ordered: NDArray[np.int64] = found[np.argsort(-scores[found], kind="stable")]
    return ordered


def top_k(scores: Scores, count: float) -> Kept:
    """Keep this many of the likeliest tokens, and tokens as likely as the last of them.

    Source: Fan et al., arXiv 1805.04833.
    """
    count = min(int(count), len(scores))
    return np.flatnonzero(scores >= np.partition(scores, -count)[-count])


def top_p(scores: Scores, reach: float) -> Kept:
    """Keep the fewest likeliest tokens that together reach a probability; the first ones if equal.

    Source: Holtzman et al., arXiv 1904.09751.
    """
    chances = probabilities(scores)
    # All values below (1 - reach) / V together are less than what may be left out, so they need not be sorted.
    candidates = np.flatnonzero(chances >= (1 - reach) / len(chances))
    order = candidates[np.argsort(-chances[candidates], kind="stable")]
    reached = chances[order].cumsum()
    return np.sort(order[: int(reached[:-1].searchsorted(reach)) + 1])


def min_p(scores: Scores, share: float) -> Kept:
    """Keep tokens whose probability is at least this share of the largest.

    Source: Nguyen et al., arXiv 2407.01082.
    """
    chances = probabilities(scores)
    keep: Kept = chances >= share * chances.max()
    return keep


def typical(scores: Scores, mass: float) -> Kept:
    """Keep the tokens whose surprise is nearest to the expected one, until they reach a probability.

    Source: Meister et al., arXiv 2202.00666.
    """
    chances = probabilities(scores)
    with np.errstate(divide="ignore"):
        distance = np.abs(-np.log(chances) - _entropy(chances))
    order = np.argsort(distance, kind="stable")
    last = min(int((chances[order].cumsum() < mass).sum()), len(order) - 1)
    keep: Kept = distance <= distance[order[last]]
    keep[order[0]] = True
    return keep


def epsilon(scores: Scores, least: float) -> Kept:
    """Keep tokens of at least this probability, and the likeliest token.

    Source: Hewitt et al., arXiv 2210.15191.
    """
    keep: Kept = (probabilities(scores) >= least) | (scores >= scores.max())
    return keep


def eta(scores: Scores, least: float) -> Kept:
    """Keep tokens of at least this probability, or less if the distribution is flat; and the likeliest token.

    Source: Hewitt et al., arXiv 2210.15191.
    """
    return epsilon(scores, min(least, least**0.5 * float(np.exp(-_entropy(probabilities(scores))))))


# Arguments of `Sampling`: the function of each, and whether a value has an effect.
WARPERS: tuple[tuple[str, Callable[[Scores, float], Kept], Callable[[float], bool]], ...] = (
    ("top_h", top_h, lambda value: True),
    ("top_k", top_k, lambda value: True),
    ("top_p", top_p, lambda value: value < 1),
    ("min_p", min_p, lambda value: value > 0),
    ("typical_p", typical, lambda value: value < 1),
    ("epsilon_cutoff", epsilon, lambda value: 0 < value < 1),
    ("eta_cutoff", eta, lambda value: 0 < value < 1),
)
