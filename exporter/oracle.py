"""The independent reference: every model as plain dense float64 mathematics on its state dict.

Nothing here is shared with the modules that are exported but the definition of visibility. Each
function is the formula of its upstream class, written for reading; attention is dense, a few rows
at a time so that long sequences fit in memory. Rows without visible keys give zeros (the packages give
the mean of all gathered values, padding included).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.arguments import LocalAttentionArgs, LocalMHAArgs, LocalTransformerArgs
from ..core.node import LOWEST_BIAS

State = Mapping[str, Tensor]
_ROWS = 256  # queries per step; memory only


def _layer_norm(x: Tensor, state: State, prefix: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[prefix + "weight"], state[prefix + "bias"])


def _below(state: State, prefix: str) -> State:
    """The part of a state dict under a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _rotated(x: Tensor, inv_freq: Tensor, position: Tensor) -> Tensor:
    """Rotate `[…, N, D]` by its positions: pairs `(c, c + D/2)` turn by `position · inv_freq_c`."""
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
) -> Tensor:
    """`[B, H, N, D]` fp64 → the same; mask bool `[B, N]`, attn_bias `[H, w, K]`."""
    geometry, length, head_dim = args.geometry(), q.shape[2], q.shape[3]
    window = geometry.window_size
    padding = -length % window if args.autopad else 0
    q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    if mask is not None:
        mask = F.pad(mask, (0, padding), value=False)
    if args.shared_qk:
        k = F.normalize(k, dim=-1)
    q = q * args.score_scale(head_dim)
    key = torch.arange(length + padding)
    decay: Tensor | None = None
    if args.rotary_dim is not None:
        inv_freq = state.get("rel_pos.inv_freq")
        if inv_freq is None:
            inv_freq = 1.0 / 10000 ** (torch.arange(0, head_dim, 2).double() / head_dim)
        q = _rotated(q, inv_freq.double(), key + geometry.forward_reach)
        k = _rotated(k, inv_freq.double(), key)
        if args.xpos_base is not None:
            channel = torch.arange(0, head_dim, 2).double()
            decay = ((channel + 0.4 * head_dim) / (1.4 * head_dim)).repeat(2)

    out = torch.zeros_like(q)
    for start in range(0, length, _ROWS):
        query = torch.arange(start, min(start + _ROWS, length))
        first, end = geometry.visible_interval(query.numpy(), len(key))
        low, high = int(first[0]), int(end[-1])  # no row of this step sees a key outside
        rows, columns = q[:, :, query], k[:, :, low:high]
        if decay is not None and args.xpos_base is not None:
            # Only the difference of the two exponents matters; counting from here keeps both small.
            base = args.xpos_base
            rows = rows * decay ** ((query - start + geometry.forward_reach) / base)[:, None]
            columns = columns * decay ** ((start - key[low:high]) / base)[:, None]
        scores = rows @ columns.transpose(-1, -2)
        seen = key[low:high]
        if attn_bias is not None:
            slot = seen[None, :] - (query[:, None] // window - geometry.look_backward) * window
            slot = slot.clamp(0, geometry.keys_per_window - 1)
            scores = scores + attn_bias[:, query[:, None] % window, slot].clamp_min(LOWEST_BIAS)
        if args.shared_qk:
            scores = scores.masked_fill(seen[None, :] == query[:, None], -5e4)
        visible = torch.from_numpy(geometry.visibility(query.numpy(), seen.numpy(), len(key)))
        if mask is not None:
            visible = visible & mask[:, None, None, low:high]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
        out[:, :, query] = weights @ v[:, :, low:high]
    return out[:, :, :length]


def local_mha(
    args: LocalMHAArgs, state: State, x: Tensor, mask: Tensor | None = None, attn_bias: Tensor | None = None
) -> Tensor:
    """`[B, N, dim]` fp64 → the same."""
    if args.prenorm:
        x = _layer_norm(x, state, "norm.")
    batch, length, _ = x.shape
    q, k, v = (
        part.view(batch, length, args.heads, args.dim_head).transpose(1, 2)
        for part in (x @ state["to_qkv.weight"].T).chunk(3, dim=-1)
    )
    if args.qk_rmsnorm:
        q = F.normalize(q, dim=-1) * state["q_scale"]
        k = F.normalize(k, dim=-1) * state["k_scale"]
    out = local_attention(args.attention_args(), _below(state, "attn_fn."), q, k, v, mask, attn_bias)
    if args.gate_values_per_head:
        gate = torch.sigmoid(x @ state["to_v_gate.0.weight"].T + state["to_v_gate.0.bias"])
        out = out * gate.transpose(1, 2).unsqueeze(-1)
    return out.transpose(1, 2).flatten(2) @ state["to_out.weight"].T


def _feed_forward(state: State, x: Tensor) -> Tensor:
    x, gate = (_layer_norm(x, state, "0.") @ state["1.weight"].T).chunk(2, dim=-1)
    return (x * F.gelu(gate)) @ state["4.weight"].T


def _position_bias(state: State, window: int) -> Tensor:
    """`bias[h, i, j] = mlp(|w + i - j|)[h]`, `[H, w, 2w]`."""
    query, key = torch.arange(window)[:, None], torch.arange(2 * window)[None, :]
    x = (window + query - key).abs().double().unsqueeze(-1)
    for layer in ("0", "2", "4"):
        x = x @ state[f"mlp.{layer}.weight"].T + state[f"mlp.{layer}.bias"]
        x = F.silu(x) if layer != "4" else x
    return x.permute(2, 0, 1)


def local_transformer(
    args: LocalTransformerArgs, mixes_residuals: bool, state: State, x: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Tokens `[B, N]` → logits, or embeddings `[B, N, dim]` fp64 → embeddings."""
    if args.num_tokens is not None:
        x = state["token_emb.weight"][x] + state["pos_emb.weight"][: x.shape[1]]
    bias = None
    if args.use_dynamic_pos_bias:
        bias = _position_bias(_below(state, "dynamic_pos_bias."), args.local_attn_window_size)
    streams = x.unsqueeze(-2).repeat_interleave(args.num_residual_streams, dim=-2)  # [B, N, S, D]
    for layer in range(args.depth):
        for part in (0, 1):
            own = _below(state, f"layers.{layer}.{part}.")
            branch = _below(own, "branch.")
            if args.num_residual_streams == 1:
                mixed, residuals, beta = streams.squeeze(-2), streams, torch.ones(1).double()
            else:
                mixed, residuals, beta = _read_streams(own, streams, mixes_residuals)
            y = local_mha(args.mha_args(), branch, mixed, mask, bias) if part == 0 else _feed_forward(branch, mixed)
            streams = residuals + beta.unsqueeze(-1) * y.unsqueeze(-2)
    out = streams.sum(dim=-2)
    if args.num_tokens is None:
        return out
    return _layer_norm(out, state, "to_logits.0.") @ state["to_logits.1.weight"].T


def _read_streams(own: State, streams: Tensor, mixes_residuals: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Branch input `[B, N, D]`, residuals `[B, N, S, D]` and `β` `[B, N, S]` of a hyper-connection."""
    u = F.normalize(streams, dim=-1) * streams.shape[-1] ** 0.5 * (own["norm.gamma"] + 1)
    alpha = own["static_alpha"] + torch.tanh(u @ own["dynamic_alpha_fn"]) * own["dynamic_alpha_scale"]
    beta = own["static_beta"] + torch.tanh(u @ own["dynamic_beta_fn"]) * own["dynamic_beta_scale"]
    mixed = alpha.transpose(-1, -2) @ streams  # m_t = Σ_s A[s, t]·r_s
    return mixed[..., 0, :], mixed[..., 1:, :] if mixes_residuals else streams, beta
