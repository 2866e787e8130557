"""Compute `LocalTransformer` as dense float64 mathematics, independently of the exported module.

It can compute some positions only. Then every layer is computed only where a later layer needs it: the same formulas on
a `SequenceSlice`, at its true positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..local_mha.reference import local_mha
from ..parts.float64 import ROWS, SequenceSlice, State, below, by_rows, layer_norm
from .arguments import LocalTransformerArgs


def _feed_forward(state: State, x: Tensor) -> Tensor:
    x, gate = (layer_norm(x, state, "0.") @ state["1.weight"].T).chunk(2, dim=-1)
    return (x * F.gelu(gate)) @ state["4.weight"].T


def _position_bias(state: State, window: int) -> Tensor:
    """Compute the position bias `bias[h, i, j] = mlp(|w + i - j|)[h]`, `[H, w, 2w]`."""
    query, key = torch.arange(window)[:, None], torch.arange(2 * window)[None, :]
    x = (window + query - key).abs().double().unsqueeze(-1)
    for layer in ("0", "2", "4"):
        x = x @ state[f"mlp.{layer}.weight"].T + state[f"mlp.{layer}.bias"]
        x = F.silu(x) if layer != "4" else x
    return x.permute(2, 0, 1)


def local_transformer(
    args: LocalTransformerArgs,
    mixes_residuals: bool,
    state: State,
    x: Tensor,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Compute the model in float64: tokens `[B, N]` → logits, or embeddings `[B, N, dim]` → the same.

    If ascending positions are given, only their outputs are computed.
    """
    if positions is None:
        return _transformer_stretch(args, mixes_residuals, state, x, mask, 0, x.shape[1])
    # Positions less than a window apart are computed together with those between them.
    gaps = torch.nonzero(positions.diff() > args.local_attn_window_size).flatten() + 1
    parts = []
    for group in positions.tensor_split(gaps):
        first, end = int(group[0]), int(group[-1]) + 1
        rows = _transformer_stretch(args, mixes_residuals, state, x, mask, first, end)
        parts.append(rows[:, group - first])
    return torch.cat(parts, dim=1)


def _transformer_stretch(
    args: LocalTransformerArgs,
    mixes_residuals: bool,
    state: State,
    x: Tensor,
    mask: Tensor | None,
    first: int,
    end: int,
) -> Tensor:
    """Compute the outputs at `[first, end)`."""
    length, geometry = x.shape[1], args.geometry()
    # Where each layer's input is needed, the last layer's output last.
    needed = [(first, end)]
    for _ in range(args.depth):
        low, high = needed[0]
        first_key, _ = geometry.receptive_interval(low, length)
        _, end_key = geometry.receptive_interval(high - 1, length)
        needed.insert(0, (first_key, end_key))
    now = slice(*needed[0])
    x = x[:, now]
    if args.num_tokens is not None:
        x = state["token_emb.weight"][x] + state["pos_emb.weight"][now]
    bias = None
    if args.use_dynamic_pos_bias:
        bias = _position_bias(below(state, "dynamic_pos_bias."), args.local_attn_window_size)
    streams = x.unsqueeze(-2).repeat_interleave(args.num_residual_streams, dim=-2)  # [B, N, S, D]
    del x  # as wide as one stream
    for layer in range(args.depth):
        (low, high), wanted = needed[layer : layer + 2]
        part = SequenceSlice(length, low, high, *wanted)
        seen = None if mask is None else mask[:, low:high]
        for name in ("0", "1"):
            own = below(state, f"layers.{layer}.{name}.")
            branch = below(own, "branch.")
            if name == "0":
                attend = partial(local_mha, args.mha_args(), branch, mask=seen, attn_bias=bias, part=part)
                streams = _connected(own, streams, mixes_residuals, attend, part)
            else:
                streams = _connected(own, streams, mixes_residuals, partial(by_rows, partial(_feed_forward, branch)))
    out = streams.sum(dim=-2)
    if args.num_tokens is None:
        return out
    last = below(state, "to_logits.")
    return by_rows(lambda rows: layer_norm(rows, last, "0.") @ last["1.weight"].T, out)


def _connected(
    own: State,
    streams: Tensor,
    mixes_residuals: bool,
    branch: Callable[[Tensor], Tensor],
    part: SequenceSlice | None = None,
) -> Tensor:
    """Compute the streams `[B, N, S, D]` after a branch and its residual connection, at the queries of the part.

    The result overwrites the given streams, because for a long sequence they take most of the memory.
    """
    if streams.shape[-2] == 1:
        y, beta = branch(streams.squeeze(-2)), torch.ones(streams.shape[:-1]).double()
    else:
        x, beta = torch.empty_like(streams[..., 0, :]), torch.empty_like(streams[..., 0])
        for rows, mixed, weight in zip(*(torch.split(t, ROWS, dim=1) for t in (streams, x, beta)), strict=True):
            read, residuals, written = _read_streams(own, rows, mixes_residuals)
            mixed.copy_(read)
            weight.copy_(written)
            rows.copy_(residuals)
        y = branch(x)
    if part is not None:
        streams, beta = part.queries(streams, 1), part.queries(beta, 1)
    for rows, weight, more in zip(*(torch.split(x, ROWS, dim=1) for x in (streams, beta, y)), strict=True):
        rows += weight.unsqueeze(-1) * more.unsqueeze(-2)
    return streams


def _read_streams(own: State, streams: Tensor, mixes_residuals: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a hyper-connection's branch input `[B, N, D]`, residuals `[B, N, S, D]` and `β` `[B, N, S]`."""
    u = F.normalize(streams, dim=-1) * streams.shape[-1] ** 0.5 * (own["norm.gamma"] + 1)
    alpha = own["static_alpha"] + torch.tanh(u @ own["dynamic_alpha_fn"]) * own["dynamic_alpha_scale"]
    beta = own["static_beta"] + torch.tanh(u @ own["dynamic_beta_fn"]) * own["dynamic_beta_scale"]
    mixed = alpha.transpose(-1, -2) @ streams  # m_t = Σ_s A[s, t]·r_s
    return mixed[..., 0, :], mixed[..., 1:, :] if mixes_residuals else streams, beta
