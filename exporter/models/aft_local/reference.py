"""The independent reference for AFT-local: its formula, dense and in float64, a few rows at a time.

Nothing here is shared with the module that is exported. A row that sees no key gives zeros before the
output matrix (labml-nn gives NaN).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import AFTLocalArgs

# Positions `[R]` → their biases, and which keys they may see, each `[R, T]`.
Window = Callable[[Tensor], tuple[Tensor, Tensor]]
_LARGEST_STEP = 1 << 24  # numbers in one step's logits or weights; memory only
# Logits within this range: e^-600 is a normal number in float64, and sums of products with it lose nothing.
_PRODUCT_RANGE = 600.0


def aft_local(
    args: AFTLocalArgs,
    state: Mapping[str, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    full_mask: Tensor | None = None,
    *,
    causal: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """Compute the layer in float64, `[T, B, D]` → the same.

    Args:
        args: upstream's arguments.
        state: the state dict, fp64.
        query: input of the gates.
        key: input of the weights.
        value: input of the values that are averaged.
        mask: bool `[B, T]`, True = keep the key.
        full_mask: bool `[T, T]`, True = this query (row) may see this key.
        causal: no query sees a later key.
        rows: compute these positions only, `[R, B, D]`; None: all.
    """
    query, key, value = (
        F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    length = key.shape[0]
    rows = torch.arange(length) if rows is None else rows
    window = partial(_window, args, state["pos_bias"], length, full_mask, causal)
    spread = (key.amax(dim=0) - key.amin(dim=0)).max() + 2 * state["pos_bias"].abs().max()
    if spread < _PRODUCT_RANGE:
        means = _product_means(window, rows, key, value, mask)
    else:
        parts = torch.split(rows, max(1, _LARGEST_STEP // key.numel()))
        means = torch.cat([_means(window, i, key, value, mask) for i in parts])
    return F.linear(query[rows].sigmoid() * means, state["output.weight"], state["output.bias"])


def _product_means(window: Window, rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the same as `_means` by products: `Σ_j e^bias[i, j]·(e^key[j]·value[j]) / Σ_j e^bias[i, j]·e^key[j]`.

    In float64 this is as exact while no exponential leaves its range; it takes `T` times fewer exponentials a channel.
    """
    weights = torch.exp(key - key.amax(dim=0))
    if mask is not None:
        weights = weights * mask.T.unsqueeze(-1)
    both = torch.cat((weights * value, weights), dim=-1).flatten(1)
    found = []
    for i in torch.split(rows, max(1, _LARGEST_STEP // len(key))):
        bias, visible = window(i)
        sums = (torch.exp(bias) * visible) @ both
        over, under = sums.reshape(len(i), key.shape[1], -1).chunk(2, dim=-1)
        found.append((over / under).nan_to_num(0.0))
    return torch.cat(found)


def _window(
    args: AFTLocalArgs, pos_bias: Tensor, length: int, full_mask: Tensor | None, causal: bool, i: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the biases of positions `i`, and which keys they may see, each `[R, T]`."""
    i, j = i[:, None], torch.arange(length)[None, :]
    bias = torch.where((i - j).abs() < args.local_window_size, pos_bias[i, j], 0.0)
    visible = (j <= i) if causal else torch.ones_like(bias, dtype=torch.bool)
    return bias, visible if full_mask is None else visible & full_mask[i, j]


def _means(window: Window, i: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the weighted means of the values at positions `i`, `[R, B, D]`."""
    bias, visible = window(i)
    visible = visible.unsqueeze(-1)  # [R, T, B]
    if mask is not None:
        visible = visible & mask.T
    logits = (bias[:, :, None, None] + key).masked_fill(~visible.unsqueeze(-1), -torch.inf)
    weights = torch.exp(logits - logits.logsumexp(dim=1, keepdim=True)).nan_to_num(0.0)
    return (weights * value).sum(dim=1)
