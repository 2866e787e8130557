"""Compute upstream's output for a query whose visible keys are all masked.

The attention node gives zeros. Upstream fills every score of such a row with the same number, so its softmax spreads
evenly over all `K` gathered slots, including masked keys and padding:

    o_t = 1/K · Σ_slots v_slot,   v = 0 where the sequence was padded to whole windows, v = -1 beyond that

Models are not trained on these outputs, but in a user's model other layers read them (a convolution, a pooling), so a
module that replaces upstream's must give them too.

Source: `local_attention.LocalAttention.forward`, local-attention 1.11.2: `look_around` pads with -1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ....core.geometry import WindowGeometry


def fill_fully_masked_rows(
    output: Tensor, value: Tensor, key_mask: Tensor, geometry: WindowGeometry, *, sequence_first: bool
) -> Tensor:
    """Return `output` with upstream's output in the rows that see no kept key.

    Args:
        output: output of the attention node, `[B, N, H, D]` if `sequence_first`, else `[B, H, N, D]`.
        value: the values, in the same layout.
        key_mask: bool `[B, N]`, True = keep.
        geometry: which keys a query sees.
        sequence_first: the layout.
    """
    axis = 1 if sequence_first else 2
    length, window = value.shape[axis], geometry.window_size
    own_window = torch.arange(length) // window
    sums = _in_windows(value, axis, window).sum(dim=axis + 1)  # [B, windows, H, D] or [B, H, windows, D]
    mean = _over_neighbours(lambda _: sums, axis, geometry, beyond=-float(window)) / geometry.keys_per_window
    unseen = _kept_and_visible(key_mask, geometry) == 0  # [B, N]
    unseen = unseen[:, :, None, None] if sequence_first else unseen[:, None, :, None]
    return torch.where(unseen, mean.index_select(axis, own_window).to(output.dtype), output)


def _in_windows(x: Tensor, axis: int, window: int) -> Tensor:
    """Split an axis of `x` into whole windows, padded with zeros; also for dynamic lengths."""
    length = x.shape[axis]
    after = [0, 0] * (x.ndim - 1 - axis) + [0, window - 1]
    whole = F.pad(x, after).narrow(axis, 0, (length + window - 1) // window * window)
    return whole.reshape(*x.shape[:axis], -1, window, *x.shape[axis + 1 :])


def _over_neighbours(pick: Callable[[int], Tensor], axis: int, geometry: WindowGeometry, beyond: float) -> Tensor:
    """Sum over a window and the windows it looks at; `pick(shift)` is the summand, `beyond` its value outside."""
    total: Tensor | None = None
    back, ahead = geometry.look_backward, geometry.look_forward
    for shift in range(-back, ahead + 1):
        x = pick(shift)
        padded = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [back, ahead], value=beyond)
        part = padded.narrow(axis, back + shift, x.shape[axis])
        total = part if total is None else total + part
    assert total is not None
    return total


def _kept_and_visible(key_mask: Tensor, geometry: WindowGeometry) -> Tensor:
    """Count the kept keys that each query sees, `[B, N]`.

    An interval from `t - b·w` to `t + f·w` consists of the end of one window, whole windows, and the start of another.
    """
    length = key_mask.shape[1]
    first, last = -geometry.look_backward, geometry.look_forward
    kept = _in_windows(key_mask.to(torch.float32), 1, geometry.window_size)  # [B, windows, w]
    up_to = kept.cumsum(dim=2)
    whole = kept.sum(dim=2, keepdim=True).expand_as(kept)
    ends_at_offset = geometry.causal or geometry.exact_windowsize

    def pick(shift: int) -> Tensor:
        starts_here = geometry.exact_windowsize and shift == first
        if shift == last and ends_at_offset:
            return kept if starts_here else up_to
        return whole - up_to + kept if starts_here else whole

    return _over_neighbours(pick, 1, geometry, beyond=0.0).flatten(1).narrow(1, 0, length)
