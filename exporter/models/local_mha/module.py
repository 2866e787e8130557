"""`local_attention.LocalMHA` (and zeta's copy of it) with static shapes.

    x → LayerNorm? → q, k, v = W_qkv x → (qk_rmsnorm: q = q_scale·q/‖q‖, k = k_scale·k/‖k‖) → LocalAttention
      → (·σ(W_gate x) per head) → W_out

Source: `local_attention.transformer.LocalMHA.forward`, local-attention 1.11.2.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from ..local_attention.module import LocalAttention
from ..parts.fused_calls import unit_norm
from .arguments import LocalMHAArgs


class MHAWeights(nn.Module):
    """The weights of `LocalMHA` under upstream's names, around the attention between them.

    Args:
        args: upstream's arguments.
        attention: the attention, with rotary and xpos.
    """

    to_qkv: nn.Module
    attn_fn: nn.Module

    def __init__(self, args: LocalMHAArgs, attention: nn.Module) -> None:
        super().__init__()
        self.heads, self.qk_rmsnorm = args.heads, args.qk_rmsnorm
        self.norm = nn.LayerNorm(args.dim) if args.prenorm else None
        self.to_qkv = nn.Linear(args.dim, args.inner_dim * 3, bias=False)
        if args.qk_rmsnorm:
            self.q_scale = nn.Parameter(torch.ones(args.dim_head))
            self.k_scale = nn.Parameter(torch.ones(args.dim_head))
        self.attn_fn = attention
        self.to_v_gate = nn.Sequential(nn.Linear(args.dim, args.heads)) if args.gate_values_per_head else None
        self.to_out = nn.Linear(args.inner_dim, args.dim, bias=False)


class LocalMHA(MHAWeights):
    """Multi-head local self-attention, `[B, N, dim]` → `[B, N, dim]`.

    Args:
        args: upstream's arguments.
        length: sequence length `N`, or the longest if `dynamic_length`.
        dynamic_length: the file's length is dynamic, up to `length`.
    """

    to_q: nn.Module
    to_k: nn.Module
    to_v: nn.Module

    def __init__(self, args: LocalMHAArgs, length: int, *, dynamic_length: bool = False) -> None:
        attention = LocalAttention(
            args.attention_args(), length, args.dim_head, sequence_first=True, dynamic_length=dynamic_length
        )
        super().__init__(args, attention)

    @torch.no_grad()
    def prepare(self) -> None:
        """Cut the matrix in three: three products cost the same as one, and need no copy to split the result."""
        for name, part in zip(("to_q", "to_k", "to_v"), self.to_qkv.get_parameter("weight").chunk(3), strict=True):
            linear = nn.Linear(part.shape[1], part.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(part)  # a view: the weights stay in memory once
            self.add_module(name, linear)
        self.to_qkv = nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None, attn_bias: Tensor | None = None) -> Tensor:
        """Compute the layer; mask bool `[B, N]`, True = keep; attn_bias `[H, w, K]`."""
        if self.norm is not None:
            x = self.norm(x.float())
        x = x.to(self.to_out.weight.dtype)
        parts = (self.to_q(x), self.to_k(x), self.to_v(x))
        q, k, v = (rearrange(part, "b n (h d) -> b n h d", h=self.heads) for part in parts)
        if self.qk_rmsnorm:
            q = (unit_norm(q) * self.q_scale).to(v.dtype)
            k = (unit_norm(k) * self.k_scale).to(v.dtype)
        out = self.attn_fn(q, k, v, mask=mask, attn_bias=attn_bias)
        if self.to_v_gate is not None:
            out = out * self.to_v_gate(x).sigmoid().unsqueeze(-1)
        projected: Tensor = self.to_out(rearrange(out, "b n h d -> b n (h d)"))
        return projected
