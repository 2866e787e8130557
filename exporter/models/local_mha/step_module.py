"""Causal `LocalMHA` a few tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..local_attention.step_module import Caches, StepAttention
from ..parts.fused_calls import unit_norm
from ..parts.step_tables import StepTables
from .arguments import LocalMHAArgs
from .module import MHAWeights


class StepMHA(MHAWeights):
    """Multi-head local self-attention of the next `C` tokens, `[B·C, dim]` → the same.

    The input has one row per token, because then the weights are exported unchanged and are the same in files for any
    chunk size.

    Args:
        args: upstream's arguments, of a causal window.
        chunk: tokens per call `C`.
        positions: how many positions the model has; None if there is no limit.
    """

    to_qkv: nn.Linear
    attn_fn: StepAttention
    qk_scale: Tensor

    def __init__(self, args: LocalMHAArgs, chunk: int, positions: int | None = None) -> None:
        super().__init__(args, StepAttention(args.attention_args(), args.heads, args.dim_head, chunk, positions))
        self.chunk = chunk

    @torch.no_grad()
    def prepare(self) -> None:
        """Concatenate the gains of queries and keys, `[2H, 1, D]`."""
        if self.qk_rmsnorm:
            gains = [x.float().expand(self.heads, 1, -1) for x in (self.q_scale, self.k_scale)]
            self.register_buffer("qk_scale", torch.cat(gains), persistent=False)

    def forward(self, x: Tensor, caches: Caches, view: StepTables) -> tuple[Tensor, Caches]:
        """Compute the output and the next caches."""
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
        """Rearrange `[B·C, heads·D]` → `[B, heads, C, D]`."""
        batch = x.shape[0] // self.chunk
        if self.chunk == 1:
            return x.reshape(batch, heads, 1, -1)
        return x.reshape(batch, self.chunk, heads, -1).transpose(1, 2)
