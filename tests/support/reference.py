"""Dense float64 numpy references, written from upstream's code and sharing nothing with the package."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, NodeAttributes

Floats = NDArray[np.float64]

PAD = -1  # what upstream puts where a window is missing


def look_around(position: NDArray[np.int64], backward: int, forward: int) -> NDArray[np.int64]:
    """`local_attention.look_around` on the positions `[windows, w]`: `[windows, K]`."""
    padded = np.pad(position, ((backward, forward), (0, 0)), constant_values=PAD)
    shifted = [padded[i : i + len(position)] for i in range(backward + 1 + forward)]
    return np.concatenate(shifted, axis=1)


def upstream_visibility(geometry: WindowGeometry, length: int) -> NDArray[np.bool_]:
    """Which keys upstream leaves unmasked, `[length, length]`; `LocalAttention.forward`'s own masks."""
    w, b, f = geometry.window_size, geometry.look_backward, geometry.look_forward
    padded = -(-length // w) * w
    query = np.arange(padded).reshape(-1, w)
    bq_k = look_around(query, b, f)[:, None, :]
    bq_t = query[:, :, None]
    hidden = np.broadcast_to(bq_k == PAD, (len(query), w, bq_k.shape[-1])).copy()
    if geometry.causal:
        hidden |= bq_t < bq_k
        if geometry.exact_windowsize:
            hidden |= bq_t > bq_k + w * b
    elif geometry.exact_windowsize:
        hidden |= (bq_k - w * f > bq_t) | (bq_t > bq_k + w * b)
    visible = np.zeros((padded, padded), dtype=bool)
    window, row, slot = np.nonzero(~hidden)
    visible[window * w + row, bq_k[window, 0, slot]] = True
    return visible[:length, :length]


def windowed_attention(
    attributes: NodeAttributes,
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    key_mask: NDArray[np.bool_] | None = None,
    attn_bias: NDArray[Any] | None = None,
    *,
    tf32_block: int = 0,
) -> Floats:
    """The node's mathematics, every key against every query; rows without visible keys are zeros.

    With `tf32_block`, factors of scores with xpos are rounded to TF32, as by a kernel with so many queries a block.
    """
    g = attributes.geometry
    q, k, v = (x.astype(np.float64).transpose(attributes.perm) for x in (query, key, value))
    length, dim = q.shape[2:]
    t = np.arange(length)
    if attributes.xpos_scale_base:
        half = (2 * np.arange(dim // 2) + 0.4 * dim) / (1.4 * dim)
    if attributes.xpos_scale_base and tf32_block:
        scores = _tf32_scores(q, k, half, attributes, tf32_block)
    elif attributes.xpos_scale_base:
        exponent = (t[:, None] - t[None, :] + g.look_forward * g.window_size) / attributes.xpos_scale_base
        decay = np.concatenate((half, half)) ** exponent[:, :, None]
        scores = np.einsum("bhid,bhjd,ijd->bhij", q, k, decay)
    else:
        scores = np.einsum("bhid,bhjd->bhij", q, k)
    scores *= attributes.scale
    visible = upstream_visibility(g, length)
    if attn_bias is not None:
        width = attn_bias.shape[-1]
        slot = t[None, :] - (t[:, None] // g.window_size - g.look_backward) * g.window_size
        gathered = (slot >= 0) & (slot < width)
        scores += np.where(gathered, attn_bias[:, (t % g.window_size)[:, None], slot.clip(0, width - 1)], 0)
    if attributes.shared_qk:
        scores[..., t, t] = -5e4
    visible = visible[None, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    weights /= np.where(total == 0, 1, total)
    output = weights @ np.where(np.isfinite(v), v, 0)
    for b, h, s, c in np.argwhere(~np.isfinite(v)):  # a weight of 0 would not hide them
        seen = np.broadcast_to(visible, scores.shape)[b, h, :, s]
        output[b, h, seen, c] += weights[b, h, seen, s] * v[b, h, s, c]
    return output if attributes.perm == HEADS_FIRST else output.transpose(0, 2, 1, 3)


def to_tf32(x: Floats) -> Floats:
    """The nearest numbers with the 11 binary digits of TF32; of two, the larger in size."""
    bits = (x.astype(np.float32).view(np.int32) + 0x1000) & -0x2000
    return bits.view(np.float32).astype(np.float64)


def _tf32_scores(query: Floats, key: Floats, half: Floats, attributes: NodeAttributes, block: int) -> Floats:
    """Products of queries and keys, both scaled from the middle of the query's block and rounded."""
    g, t = attributes.geometry, np.arange(query.shape[2])
    zeta = np.concatenate((half, half))
    scores = np.zeros((*query.shape[:3], len(t)))
    for start in range(0, len(t), block):
        rows, middle = t[start : start + block], start + block // 2
        q, k = (
            to_tf32(x * zeta ** (distance[:, None] / attributes.xpos_scale_base))
            for x, distance in (
                (query[:, :, rows], rows - middle),
                (key, middle + g.look_forward * g.window_size - t),
            )
        )
        scores[:, :, rows] = q @ k.transpose(0, 1, 3, 2)
    return scores


def grouped_attention(
    geometry: WindowGeometry,
    scale: float,
    softcap: float,
    perm: tuple[int, ...],
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    key_mask: NDArray[np.bool_] | None = None,
    sinks: NDArray[Any] | None = None,
) -> Floats:
    """The mathematics of the grouped nodes, head by head, with the sink as one more column of the softmax."""
    q, k, v = (x.astype(np.float64).transpose(perm) for x in (query, key, value))
    (batch, heads, length, _), groups = q.shape, q.shape[1] // k.shape[1]
    visible = np.tril(np.ones((length, length), bool)) if geometry.causal else np.ones((length, length), bool)
    if geometry.window_size < 2**31:
        visible = upstream_visibility(geometry, length)
    output = np.zeros_like(q)
    for b, h in np.ndindex(batch, heads):
        scores = scale * (q[b, h] @ k[b, h // groups].T)
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        seen = visible if key_mask is None else visible & key_mask[b]
        scores = np.where(seen, scores, -np.inf)
        sink = -np.inf if sinks is None else float(sinks[h])
        scores = np.concatenate((scores, np.full((length, 1), sink)), axis=1)
        top = scores.max(1, keepdims=True)
        weights = np.exp(scores - np.where(np.isinf(top), 0, top))
        total = weights.sum(1, keepdims=True)
        output[b, h] = (weights / np.where(total == 0, 1, total))[:, :-1] @ v[b, h // groups]
    return output if perm == HEADS_FIRST else output.transpose(0, 2, 1, 3)


def rows_without_keys(geometry: WindowGeometry, key_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """`[B, N]`: queries none of whose visible keys are kept."""
    visible = upstream_visibility(geometry, key_mask.shape[1])
    return ~(visible[None] & key_mask[:, None, :]).any(-1)
