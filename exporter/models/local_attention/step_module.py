"""Causal `LocalAttention` and `LocalMHA` a few tokens at a time.

The mathematics of `exporter/models/local_attention/module.py` and `local_mha/module.py`; the keys and values of the
tokens before come from a ring buffer (`core/step_node.py`). A single token needs no transpositions: between
`[B, 1, H·D]` and `[B, H, 1, D]` nothing moves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....core.step_node import StepAttributes
from ..arguments import LocalAttentionArgs, LocalMHAArgs
from ..parts.norms import unit_norm
from ..parts.step_attention_op import attend_step
from ..parts.step_rotary import RotaryPhase, rotate
from ..parts.step_tables import View, Viewpoint

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
        self.viewpoint = Viewpoint(self.attributes, heads, head_dim, chunk)

    def view(self, position: Tensor, batch: int, attn_bias: Tensor | None = None) -> View:
        """What layers of this window and these rotary frequencies have in common; position `[1]`."""
        view: View = self.viewpoint(position, batch, self.rel_pos, attn_bias)
        return view

    def forward(self, qk: Tensor, v: Tensor, caches: Caches, view: View) -> tuple[Tensor, Caches]:
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
        out, next_key, next_value = attend_step(q, k, v, caches, view, self.attributes)
        return out, (next_key, next_value)


class StepMHA(nn.Module):
    """Multi-head local self-attention of the next `C` tokens, `[B·C, dim]` → the same.

    Rows, because a matrix product of matrices is exported with the weights as they are: in files of any chunk alike.

    Args:
        args: upstream's arguments, of a causal window.
        chunk: tokens a call `C`.
    """

    qk_scale: Tensor

    def __init__(self, args: LocalMHAArgs, chunk: int) -> None:
        super().__init__()
        inner = args.dim_head * args.heads
        self.heads, self.chunk, self.qk_rmsnorm = args.heads, chunk, args.qk_rmsnorm
        self.norm = nn.LayerNorm(args.dim) if args.prenorm else None
        self.to_qkv = nn.Linear(args.dim, inner * 3, bias=False)
        if args.qk_rmsnorm:
            self.q_scale = nn.Parameter(torch.ones(args.dim_head))
            self.k_scale = nn.Parameter(torch.ones(args.dim_head))
        self.attn_fn = StepAttention(args.attention_args(), args.heads, args.dim_head, chunk)
        self.to_v_gate = nn.Sequential(nn.Linear(args.dim, args.heads)) if args.gate_values_per_head else None
        self.to_out = nn.Linear(inner, args.dim, bias=False)

    @torch.no_grad()
    def prepare(self) -> None:
        """The gains of queries and keys side by side, `[2H, 1, D]`."""
        if self.qk_rmsnorm:
            gains = [x.float().expand(self.heads, 1, -1) for x in (self.q_scale, self.k_scale)]
            self.register_buffer("qk_scale", torch.cat(gains), persistent=False)

    def forward(self, x: Tensor, caches: Caches, view: View) -> tuple[Tensor, Caches]:
        """Output and the next caches."""
        if self.norm is not None:
            x = self.norm(x.float())
        x = x.to(self.to_qkv.weight.dtype)
        qkv = self._heads_first(self.to_qkv(x), 3 * self.heads)
        qk, v = torch.split(qkv, [2 * self.heads, self.heads], dim=1)
        if self.qk_rmsnorm:
            qk = (unit_norm(qk) * self.qk_scale).to(v.dtype)
        out, following = self.attn_fn(qk, v, caches, view)
        if self.to_v_gate is not None:
            out = out * self._heads_first(self.to_v_gate(x).sigmoid(), self.heads)
        if self.chunk > 1:
            out = out.transpose(1, 2)
        projected: Tensor = self.to_out(out.reshape(x.shape[0], -1))
        return projected, following

    def _heads_first(self, x: Tensor, heads: int) -> Tensor:
        """`[B·C, heads·D]` → `[B, heads, C, D]`."""
        batch = x.shape[0] // self.chunk
        if self.chunk == 1:
            return x.reshape(batch, heads, 1, -1)
        return x.reshape(batch, self.chunk, heads, -1).transpose(1, 2)
