"""Compute `LocalAttention` as dense float64 mathematics, independently of the exported module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ....core.nodes.attention import LOWEST_BIAS
from ..parts.float64 import ROWS, SequenceSlice, State
from .arguments import LocalAttentionArgs


def _rotated(x: Tensor, inv_freq: Tensor, position: Tensor) -> Tensor:
    """Rotate `[…, N, D]` by its positions: pairs `(c, c + D/2)` by the angle `position · inv_freq_c`."""
    angle = position.double()[:, None] * inv_freq
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1)


def local_attention(
    args: LocalAttentionArgs,
    state: State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    part: SequenceSlice | None = None,
) -> Tensor:
    """Compute attention in float64, `[B, H, N, D]` → the same; mask bool `[B, N]`, attn_bias `[H, w, K]`.

    For a part of a sequence, q only has the queries of the part.
    """
    part = part or SequenceSlice.whole(q.shape[2])
    geometry, head_dim = args.geometry(), q.shape[3]
    window = geometry.window_size
    padding = -part.length % window if args.autopad else 0
    after = padding if part.end == part.length else 0
    if after:
        k, v = (F.pad(x, (0, 0, 0, after)) for x in (k, v))
    if mask is not None:
        mask = F.pad(mask, (0, after), value=False)
    key = torch.arange(part.first, part.end + after)
    inv_freq = decay = None
    if args.rotary_dim is not None:
        inv_freq = state.get("rel_pos.inv_freq")
        if inv_freq is None:
            inv_freq = 1.0 / 10000 ** (torch.arange(0, head_dim, 2).double() / head_dim)
        inv_freq = inv_freq.double()
        if args.xpos_base is not None:
            channel = torch.arange(0, head_dim, 2).double()
            decay = ((channel + 0.4 * head_dim) / (1.4 * head_dim)).repeat(2)

    out = torch.zeros_like(q)
    for start in range(part.query_first, part.query_end, ROWS):
        query = torch.arange(start, min(start + ROWS, part.query_end))
        first, end = geometry.visible_interval(query.numpy(), part.length + padding)
        # The rows of this step see no key outside this range.
        here, columns = query - part.query_first, slice(int(first[0]) - part.first, int(end[-1]) - part.first)
        rows, seen = q[:, :, here] * args.score_scale(head_dim), key[columns]
        keys = F.normalize(k[:, :, columns], dim=-1) if args.shared_qk else k[:, :, columns]
        if inv_freq is not None:
            rows = _rotated(rows, inv_freq, query + geometry.forward_reach)
            keys = _rotated(keys, inv_freq, seen)
        if decay is not None and args.xpos_base is not None:
            # Only the difference of the two exponents matters; this origin keeps both small.
            base = args.xpos_base
            rows = rows * decay ** ((query - start + geometry.forward_reach) / base)[:, None]
            keys = keys * decay ** ((start - seen) / base)[:, None]
        scores = rows @ keys.transpose(-1, -2)
        if attn_bias is not None:
            slot = seen[None, :] - (query[:, None] // window - geometry.look_backward) * window
            slot = slot.clamp(0, geometry.keys_per_window - 1)
            scores = scores + attn_bias[:, query[:, None] % window, slot].clamp_min(LOWEST_BIAS)
        if args.shared_qk:
            scores = scores.masked_fill(seen[None, :] == query[:, None], -5e4)
        visible = torch.from_numpy(geometry.visibility(query.numpy(), seen.numpy(), part.length + padding))
        if mask is not None:
            visible = visible & mask[:, None, None, columns]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1).masked_fill(~visible, 0.0)
        out[:, :, here] = weights @ v[:, :, columns]
    return out
