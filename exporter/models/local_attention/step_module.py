"""Causal `LocalAttention` a few tokens at a time.

The formula of `module.py`; the keys and values of earlier tokens come from a ring buffer (`core/nodes/step.py`). A
single token needs no transpositions, because `[B, 1, H·D]` and `[B, H, 1, D]` have the same order in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....core.nodes.step import StepAttributes
from ..parts.fused_calls import unit_norm
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
        chunk: tokens per call `C`.
        positions: how many positions the model has; None if there is no limit.
    """

    def __init__(
        self, args: LocalAttentionArgs, heads: int, head_dim: int, chunk: int, positions: int | None = None
    ) -> None:
        super().__init__()
        self.shared_qk = args.shared_qk
        self.rel_pos = RotaryPhase(args.rotary_dim, positions) if args.rotary_dim is not None else None
        self.attributes = StepAttributes(
            args.geometry(), args.score_scale(head_dim), args.shared_qk, args.xpos_base or 0.0
        )
        self.viewpoint = StepTableBuilder(self.attributes, heads, head_dim, chunk, positions)

    def view(self, position: Tensor, batch: int, attn_bias: Tensor | None = None) -> StepTables:
        """Compute the tables that layers with this window and these rotary frequencies share; position `[1]`."""
        view: StepTables = self.viewpoint(position, batch, self.rel_pos, attn_bias)
        return view

    def forward(self, qk: Tensor, v: Tensor, caches: Caches, view: StepTables) -> tuple[Tensor, Caches]:
        """Attend to the ring and the new tokens, and update the ring.

        Takes queries and keys as one tensor `[B, 2H, C, D]`, because they are rotated by the same angles, and values
        `[B, H, C, D]`.

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
