"""Define the PyTorch operator of the grouped nodes, with its plain reference.

`torch.ops.localattn.grouped_attention` is what export-friendly modules call (`core.nodes.grouped` has the mathematics).
On a GPU the kernel of `kernel` computes it, where it can. The reference takes some queries at a time, so that memory
stays linear in the sequence length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.geometry import WindowGeometry
from ..core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST
from ..core.nodes.grouped import GroupedAttributes
from .torch_op import why_no_kernel

# Queries per step: enough for efficient matrix products, few enough for small scores.
_BLOCK = 256


@torch.library.custom_op("localattn::grouped_attention", mutates_args=())
def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    sinks: Tensor | None,
    window_size: int,
    look_backward: int,
    look_forward: int,
    causal: bool,
    exact_windowsize: bool,
    scale: float,
    softcap: float,
    sequence_first: bool,
) -> Tensor:
    """Compute the attention of every query to its visible keys.

    Args:
        query: `[B, N, H, D]` if `sequence_first`, else `[B, H, N, D]`.
        key: as query, with heads that divide those of the queries.
        value: as key.
        key_mask: bool `[B, N]`, True = keep.
        sinks: `[H]`.
        window_size: queries per window; `core.geometry.ALL_KEYS` for no window.
        look_backward: windows seen before a query's own.
        look_forward: windows seen after it.
        causal: no later key is seen.
        exact_windowsize: limit distances instead of whole windows.
        scale: factor of the scores.
        softcap: most that a score can be, 0 without a cap.
        sequence_first: layout, see query.
    """
    geometry = WindowGeometry(window_size, look_backward, look_forward, causal, exact_windowsize)
    return _reference(query, key, value, key_mask, sinks, _attributes(geometry, scale, softcap, sequence_first))


def _attributes(geometry: WindowGeometry, scale: float, softcap: float, sequence_first: bool) -> GroupedAttributes:
    """Return the operator's arguments as the attributes of a node."""
    return GroupedAttributes(geometry, scale, softcap, SEQUENCE_FIRST if sequence_first else HEADS_FIRST)


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    sinks: Tensor | None,
    attributes: GroupedAttributes,
) -> Tensor:
    """Compute the operator in plain PyTorch, for any device, element type and head size."""
    geometry, scale, softcap = attributes.geometry, attributes.scale, attributes.softcap
    sequence_first = attributes.perm == SEQUENCE_FIRST
    if sequence_first:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    batch, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    precise = torch.promote_types(query.dtype, torch.float32)
    # [B, KV, G, N, D], and keys with one head for each group.
    query = query.reshape(batch, kv_heads, heads // kv_heads, length, head_dim)
    key, value = key.unsqueeze(2), value.unsqueeze(2)
    sink = None if sinks is None else sinks.to(precise).reshape(kv_heads, heads // kv_heads, 1, 1)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for start in range(0, length, _BLOCK):
        rows = torch.arange(start, min(start + _BLOCK, length))
        first, end = geometry.visible_interval(rows.numpy(), length)
        columns = torch.arange(int(first[0]), int(end[-1]))
        scores = query[..., rows, :].to(precise) @ key[..., columns, :].to(precise).transpose(-1, -2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        visible = torch.from_numpy(geometry.visibility(rows.numpy(), columns.numpy(), length)).to(scores.device)
        if key_mask is not None:
            visible = visible & key_mask[:, None, None, None, columns]
        scores = scores.masked_fill(~visible, float("-inf"))
        if sink is not None:
            scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : len(columns)]
        weights = weights.masked_fill(~visible, 0.0)  # a row without visible keys is all NaN: make it zeros
        output[..., rows, :] = (weights @ value[..., columns, :].to(precise)).to(value.dtype)
    output = output.reshape(batch, heads, length, head_dim)
    return output.transpose(1, 2).contiguous() if sequence_first else output


@grouped_attention.register_fake
def _(query: Tensor, *_rest: object, **_options: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@grouped_attention.register_kernel("cuda")
def _on_gpu(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, sinks: Tensor | None, *options: Any
) -> Tensor:
    """Compute the operator by the kernel, or by the reference if no kernel supports the case."""
    *window, scale, softcap, sequence_first = options  # the operator's, after its tensors
    attributes = _attributes(WindowGeometry(*window), scale, softcap, sequence_first)
    # No kernel has both, because no known model has both.
    if (softcap and sinks is not None) or why_no_kernel(query, attributes):
        return _reference(query, key, value, key_mask, sinks, attributes)
    from .kernel.launch import launch

    return launch(query, key, value, key_mask, None, attributes, sinks=sinks)
