"""Compute `LocalMHA` as dense float64 mathematics, independently of the exported module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..local_attention.reference import local_attention
from ..parts.float64 import SequenceSlice, State, below, by_rows, layer_norm
from .arguments import LocalMHAArgs


def local_mha(
    args: LocalMHAArgs,
    state: State,
    x: Tensor,
    mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    part: SequenceSlice | None = None,
) -> Tensor:
    """Compute the layer in float64, `[B, N, dim]` → the same, or only the queries of a part."""
    part = part or SequenceSlice.whole(x.shape[1])
    queries = part.queries(x, 1)

    def normed(rows: Tensor) -> Tensor:
        return layer_norm(rows, state, "norm.") if args.prenorm else rows

    def heads(of: Tensor, matrix: Tensor, scale: str | None) -> Tensor:
        """Project to heads, `[B, H, N, D]`."""

        def project(rows: Tensor) -> Tensor:
            projected = (normed(rows) @ matrix.T).view(*rows.shape[:2], args.heads, args.dim_head)
            return projected if scale is None else F.normalize(projected, dim=-1) * state[scale]

        return by_rows(project, of).transpose(1, 2)

    to_q, to_k, to_v = state["to_qkv.weight"].chunk(3)
    q_scale, k_scale = ("q_scale", "k_scale") if args.qk_rmsnorm else (None, None)
    # q, k and v have no names, so that their memory is freed after attention.
    out = local_attention(
        args.attention_args(),
        below(state, "attn_fn."),
        heads(queries, to_q, q_scale),
        heads(x, to_k, k_scale),
        heads(x, to_v, None),
        mask,
        attn_bias,
        part,
    )
    if args.gate_values_per_head:
        weight, bias = state["to_v_gate.0.weight"], state["to_v_gate.0.bias"]
        gate = by_rows(lambda rows: torch.sigmoid(normed(rows) @ weight.T + bias), queries)
        out = out * gate.transpose(1, 2).unsqueeze(-1)
    return by_rows(lambda rows: rows.flatten(2) @ state["to_out.weight"].T, out.transpose(1, 2))
