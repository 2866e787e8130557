"""Causal `LocalAttention` a few tokens at a time.

The mathematics of `module.py`; the keys and values of the
tokens before come from a ring buffer (`core/nodes/step.py`). A single token needs no transpositions: between
`[B, 1, H·D]` and `[B, H, 1, D]` nothing moves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....core.nodes.step import StepAttributes
from ..parts.norms import unit_norm
from ..parts.step_attention_op import step_attention_op
from ..parts.step_rotary import RotaryPhase, rotate
from ..parts.step_tables import StepTableBuilder, StepTables
from .arguments import LocalAttentionArgs

# Ring of keys, ring of values.
Caches = tuple[Tensor, Tensor]


class StepAttention(nn.Module):
    """Windowed attention of the next `C` tokens.

    Args:
        args: upstream's arguments, of a causal window.
        heads: heads `H`.
        head_dim: head size `D`.
        chunk: tokens a call `C`.
    """

    def __init__(self, args: LocalAttentionArgs, heads: int, head_dim: int, chunk: int) -> None:
        super().__init__()
        self.shared_qk = args.shared_qk
        self.rel_pos = RotaryPhase(args.rotary_dim) if args.rotary_dim is not None else None
        self.attributes = StepAttributes(
            args.geometry(), args.score_scale(head_dim), args.shared_qk, args.xpos_base or 0.0
        )
        self.viewpoint = StepTableBuilder(self.attributes, heads, head_dim, chunk)

    def view(self, position: Tensor, batch: int, attn_bias: Tensor | None = None) -> StepTables:
        """What layers of this window and these rotary frequencies have in common; position `[1]`."""
        view: StepTables = self.viewpoint(position, batch, self.rel_pos, attn_bias)
        return view

    def forward(self, qk: Tensor, v: Tensor, caches: Caches, view: StepTables) -> tuple[Tensor, Caches]:
        """Queries and keys `[B, 2H, C, D]`, which are rotated alike, and values `[B, H, C, D]`.

        Returns:
            Output `[B, H, C, D]` and the next caches.
        """
        if self.shared_qk:
            q, k = qk.chunk(2, dim=1)
            qk = torch.cat((q, unit_norm(k).to(k.dtype)), dim=1)
        if view.rotation:
            qk = rotate(qk, view.rotation)
        q, k = qk.chunk(2, dim=1)
        out, next_key, next_value = step_attention_op(q, k, v, caches, view, self.attributes)
        return out, (next_key, next_value)
