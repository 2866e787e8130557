"""Find the tokens whose experts rounding decides.

A mixture of experts takes those with the largest scores. Where two scores are as near to each other as the file's
rounding, half precision may take another expert than float64 does, and the token's output is another one altogether.
Both are right as far as the precision goes, so there is nothing to compare.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Half precision moved scores of tiny models by 0.001 of their root mean square in fp16, one unit of its last place;
# a distance of two scores beyond eight units is no question of rounding.
_UNITS = 8


def margin(scores: Tensor, chosen: int) -> Tensor | None:
    """Return by how much the last expert chosen leads the first one left, over the scores' root mean square.

    Probabilities are compared by their logarithms, which are scores.

    Args:
        scores: of all experts, `[…, experts]`.
        chosen: how many are chosen.

    Returns:
        `[…]` flattened; None where all are chosen.
    """
    if scores.ndim < 2 or not scores.is_floating_point() or not 0 < chosen < scores.shape[-1]:
        return None
    totals = scores.sum(dim=-1)
    if bool((scores >= 0).all()) and torch.allclose(totals, torch.ones_like(totals)):
        scores = scores.clamp_min(torch.finfo(scores.dtype).tiny).log()
        scores = scores - scores.mean(dim=-1, keepdim=True)
    largest = scores.topk(chosen + 1, dim=-1).values
    size = scores.square().mean().sqrt().clamp_min(torch.finfo(scores.dtype).tiny)
    return ((largest[..., chosen - 1] - largest[..., chosen]) / size).flatten()


def undecided(margins: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where margins are within the rounding of a precision."""
    return margins < _UNITS * torch.finfo(dtype).eps
