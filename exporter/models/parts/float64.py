"""The independent reference: every model as plain dense float64 mathematics on its state dict.

Nothing here is shared with the modules that are exported but the definition of visibility. Each
function is the formula of its upstream class, written for reading; attention is dense, and all is done a few rows
at a time, so that of a long sequence only what is kept for later is in memory as a whole. Rows without visible keys
give zeros (the packages give the mean of all gathered values, padding included).

A transformer can be asked for some positions only. Then every layer is computed where a later layer will look, and
nowhere else: the same formulas on a `Stretch` of the sequence, at its true positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ....core.node import LOWEST_BIAS
from ...resident import give_back_around
from ..arguments import LocalAttentionArgs, LocalMHAArgs, LocalTransformerArgs

State = Mapping[str, Tensor]
_ROWS = 128  # positions per step; memory only
_READ = 32 << 20  # bytes of weights that are read before their pages go back


class InDouble(Mapping[str, Tensor]):
    """A state dict whose tensors become float64 when they are asked for: one layer at a time, not all at once.

    If it is mapped from a file, the pages that were read do not stay in memory.
    """

    def __init__(self, state: State) -> None:
        self._state, self._read = state, 0

    def __getitem__(self, name: str) -> Tensor:
        found = self._state[name]
        double = found.double()
        self._read += found.nbytes
        if self._read >= _READ:
            self._read = 0
            give_back_around(tensor.data_ptr() for tensor in self._state.values())
        return double

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __contains__(self, name: object) -> bool:
        return name in self._state


@dataclass(frozen=True)
class Stretch:
    """A part of a sequence: keys at the positions `[first, end)` of `length`, queries at `[query_first, query_end)`."""

    length: int
    first: int
    end: int
    query_first: int
    query_end: int

    @classmethod
    def whole(cls, length: int) -> Stretch:
        """All of it."""
        return cls(length, 0, length, 0, length)

    def queries(self, x: Tensor, axis: int) -> Tensor:
        """The rows of the queries, of a tensor that has a row for every key."""
        return x.narrow(axis, self.query_first - self.first, self.query_end - self.query_first)


def _layer_norm(x: Tensor, state: State, prefix: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[prefix + "weight"], state[prefix + "bias"])


def _by_rows(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What has no look at other positions, of `[B, N, …]`, a few positions at a time."""
    out = torch.empty(0)
    for start in range(0, x.shape[1], _ROWS):
        rows = compute(x[:, start : start + _ROWS])
        if start == 0:
            out = rows.new_empty((rows.shape[0], x.shape[1], *rows.shape[2:]))
        out[:, start : start + _ROWS] = rows
    return out


def _below(state: State, prefix: str) -> State:
    """The part of a state dict under a prefix, without it."""
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


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
    part: Stretch | None = None,
) -> Tensor:
    """`[B, H, N, D]` fp64 → the same; mask bool `[B, N]`, attn_bias `[H, w, K]`; of a part, q has its queries only."""
    part = part or Stretch.whole(q.shape[2])
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
    for start in range(part.query_first, part.query_end, _ROWS):
        query = torch.arange(start, min(start + _ROWS, part.query_end))
        first, end = geometry.visible_interval(query.numpy(), part.length + padding)
        # No row of this step sees a key outside these.
        here, columns = query - part.query_first, slice(int(first[0]) - part.first, int(end[-1]) - part.first)
        rows, seen = q[:, :, here] * args.score_scale(head_dim), key[columns]
        keys = F.normalize(k[:, :, columns], dim=-1) if args.shared_qk else k[:, :, columns]
        if inv_freq is not None:
            rows = _rotated(rows, inv_freq, query + geometry.forward_reach)
            keys = _rotated(keys, inv_freq, seen)
        if decay is not None and args.xpos_base is not None:
            # Only the difference of the two exponents matters; counting from here keeps both small.
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
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
        out[:, :, here] = weights @ v[:, :, columns]
    return out


def local_mha(
    args: LocalMHAArgs,
    state: State,
    x: Tensor,
    mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    part: Stretch | None = None,
) -> Tensor:
    """`[B, N, dim]` fp64 → the same, or the queries of a part."""
    part = part or Stretch.whole(x.shape[1])
    queries = part.queries(x, 1)

    def normed(rows: Tensor) -> Tensor:
        return _layer_norm(rows, state, "norm.") if args.prenorm else rows

    def heads(of: Tensor, matrix: Tensor, scale: str | None) -> Tensor:
        """`[B, H, N, D]`."""

        def project(rows: Tensor) -> Tensor:
            projected = (normed(rows) @ matrix.T).view(*rows.shape[:2], args.heads, args.dim_head)
            return projected if scale is None else F.normalize(projected, dim=-1) * state[scale]

        return _by_rows(project, of).transpose(1, 2)

    to_q, to_k, to_v = state["to_qkv.weight"].chunk(3)
    q_scale, k_scale = ("q_scale", "k_scale") if args.qk_rmsnorm else (None, None)
    # No name holds q, k and v: they are gone once attention is.
    out = local_attention(
        args.attention_args(),
        _below(state, "attn_fn."),
        heads(queries, to_q, q_scale),
        heads(x, to_k, k_scale),
        heads(x, to_v, None),
        mask,
        attn_bias,
        part,
    )
    if args.gate_values_per_head:
        weight, bias = state["to_v_gate.0.weight"], state["to_v_gate.0.bias"]
        gate = _by_rows(lambda rows: torch.sigmoid(normed(rows) @ weight.T + bias), queries)
        out = out * gate.transpose(1, 2).unsqueeze(-1)
    return _by_rows(lambda rows: rows.flatten(2) @ state["to_out.weight"].T, out.transpose(1, 2))


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
    args: LocalTransformerArgs,
    mixes_residuals: bool,
    state: State,
    x: Tensor,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Tokens `[B, N]` → logits, or embeddings `[B, N, dim]` fp64 → the same; at ascending positions only, if given."""
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
    """The outputs at `[first, end)`."""
    length, geometry = x.shape[1], args.geometry()
    # Where each layer's input is needed, the last layer's output last.
    needed = [(first, end)]
    for _ in range(args.depth):
        low, high = needed[0]
        needed.insert(
            0, (geometry.receptive_interval(low, length)[0], geometry.receptive_interval(high - 1, length)[1])
        )
    now = slice(*needed[0])
    x = x[:, now]
    if args.num_tokens is not None:
        x = state["token_emb.weight"][x] + state["pos_emb.weight"][now]
    bias = None
    if args.use_dynamic_pos_bias:
        bias = _position_bias(_below(state, "dynamic_pos_bias."), args.local_attn_window_size)
    streams = x.unsqueeze(-2).repeat_interleave(args.num_residual_streams, dim=-2)  # [B, N, S, D]
    del x  # as wide as one stream
    for layer in range(args.depth):
        (low, high), wanted = needed[layer : layer + 2]
        part = Stretch(length, low, high, *wanted)
        seen = None if mask is None else mask[:, low:high]
        for name in ("0", "1"):
            own = _below(state, f"layers.{layer}.{name}.")
            branch = _below(own, "branch.")
            if name == "0":
                attend = partial(local_mha, args.mha_args(), branch, mask=seen, attn_bias=bias, part=part)
                streams = _connected(own, streams, mixes_residuals, attend, part)
            else:
                streams = _connected(own, streams, mixes_residuals, partial(_by_rows, partial(_feed_forward, branch)))
    out = streams.sum(dim=-2)
    if args.num_tokens is None:
        return out
    last = _below(state, "to_logits.")
    return _by_rows(lambda rows: _layer_norm(rows, last, "0.") @ last["1.weight"].T, out)


def _connected(
    own: State, streams: Tensor, mixes_residuals: bool, branch: Callable[[Tensor], Tensor], part: Stretch | None = None
) -> Tensor:
    """The streams `[B, N, S, D]` after a branch and its residual connection, at the queries of the part.

    Written over the streams that came: of a long sequence they are what takes the memory.
    """
    if streams.shape[-2] == 1:
        y, beta = branch(streams.squeeze(-2)), torch.ones(streams.shape[:-1]).double()
    else:
        x, beta = torch.empty_like(streams[..., 0, :]), torch.empty_like(streams[..., 0])
        for rows, mixed, weight in zip(*(torch.split(t, _ROWS, dim=1) for t in (streams, x, beta)), strict=True):
            read, residuals, written = _read_streams(own, rows, mixes_residuals)
            mixed.copy_(read)
            weight.copy_(written)
            rows.copy_(residuals)
        y = branch(x)
    if part is not None:
        streams, beta = part.queries(streams, 1), part.queries(beta, 1)
    for rows, weight, more in zip(*(torch.split(x, _ROWS, dim=1) for x in (streams, beta, y)), strict=True):
        rows += weight.unsqueeze(-1) * more.unsqueeze(-2)
    return streams


def _read_streams(own: State, streams: Tensor, mixes_residuals: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Branch input `[B, N, D]`, residuals `[B, N, S, D]` and `β` `[B, N, S]` of a hyper-connection."""
    u = F.normalize(streams, dim=-1) * streams.shape[-1] ** 0.5 * (own["norm.gamma"] + 1)
    alpha = own["static_alpha"] + torch.tanh(u @ own["dynamic_alpha_fn"]) * own["dynamic_alpha_scale"]
    beta = own["static_beta"] + torch.tanh(u @ own["dynamic_beta_fn"]) * own["dynamic_beta_scale"]
    mixed = alpha.transpose(-1, -2) @ streams  # m_t = Σ_s A[s, t]·r_s
    return mixed[..., 0, :], mixed[..., 1:, :] if mixes_residuals else streams, beta
