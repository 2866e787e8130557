"""Attention for modules: one node while exporting, the PyTorch operator otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from ....core.errors import UsageError
from ....core.geometry import WindowGeometry
from ....core.nodes.attention import (
    DOMAIN,
    DOMAIN_VERSION,
    HEADS_FIRST,
    SEQUENCE_FIRST,
    NodeAttributes,
    NodeVariant,
    check_xpos,
    choose_query_block,
)
from ....core.nodes.grouped import GroupedAttributes, choose_grouped_block
from ....plugins import grouped_op, torch_op


def windowed_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    geometry: WindowGeometry,
    scale: float,
    *,
    key_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    shared_qk: bool = False,
    sequence_first: bool = True,
    xpos_scale_base: float = 0.0,
) -> Tensor:
    """Compute windowed attention; the arguments are those of `plugins.torch_op.windowed_attention`.

    Raises:
        UsageError: xpos is used with heads whose width is odd or below 2.
    """
    if xpos_scale_base:
        check_xpos(query.shape[-1])
    if attn_bias is not None:
        attn_bias = attn_bias.to(query.dtype)  # plugins take inputs of one element type
    if not torch.onnx.is_in_onnx_export():
        options = (key_mask, attn_bias, *astuple(geometry), scale, shared_qk, sequence_first, xpos_scale_base)
        output: Tensor = torch_op.windowed_attention(query, key, value, *options)
        return output
    variant = NodeVariant(has_mask=key_mask is not None, has_bias=attn_bias is not None, has_xpos=bool(xpos_scale_base))
    attributes = NodeAttributes(
        geometry,
        scale,
        shared_qk=shared_qk,
        perm=SEQUENCE_FIRST if sequence_first else HEADS_FIRST,
        query_block=choose_query_block(geometry, _length(query, sequence_first), has_bias=attn_bias is not None),
        xpos_scale_base=xpos_scale_base,
    )
    return attention_node(variant.op_type, [query, key, value, key_mask, attn_bias], attributes.as_onnx())


def grouped_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    geometry: WindowGeometry,
    scale: float,
    *,
    key_mask: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    sequence_first: bool = True,
) -> Tensor:
    """Compute attention with shared heads of keys; the mathematics is that of `core.nodes.grouped`.

    It becomes a plain `WindowedAttention` node where nothing needs more: that one has a kernel for GPUs too.

    Args:
        query: `[B, N, H, D]` if `sequence_first`, else `[B, H, N, D]`.
        key: as query, with any number of heads that divides `H`.
        value: as key.
        geometry: which keys a query sees; `WindowGeometry.all_keys` for a layer without a window.
        scale: factor of the scores.
        key_mask: bool `[B, N]`, True = keep.
        softcap: the largest value of a score, 0 without a cap.
        sinks: `[H]`, one logit for each head; it joins the sum of the softmax, and has no value.
        sequence_first: layout, see query.

    Raises:
        UsageError: sizes that do not fit together, or a softcap that is no cap.
    """
    axis = 2 if sequence_first else 1
    heads, kv_heads = query.shape[axis], key.shape[axis]
    _check_sizes(query, key, value, heads, kv_heads)
    if not (math.isfinite(softcap) and softcap >= 0):
        raise UsageError(f"softcap {softcap} is no cap.", why="It is a positive number, or 0 for none.")
    if sinks is not None:
        if tuple(sinks.shape) != (heads,):
            raise UsageError(f"sinks has shape {list(sinks.shape)}; it must be [{heads}], one a head.")
        sinks = sinks.to(query.dtype)
    if heads == kv_heads and not softcap and sinks is None and not geometry.sees_all:
        return windowed_attention_op(
            query, key, value, geometry, scale, key_mask=key_mask, sequence_first=sequence_first
        )
    if not torch.onnx.is_in_onnx_export():
        options = (key_mask, sinks, *astuple(geometry), scale, softcap, sequence_first)
        output: Tensor = grouped_op.grouped_attention(query, key, value, *options)
        return output
    attributes = GroupedAttributes(
        geometry,
        scale,
        softcap,
        perm=SEQUENCE_FIRST if sequence_first else HEADS_FIRST,
        query_block=choose_grouped_block(geometry, _length(query, sequence_first)),
    )
    variant = attributes.variant(has_mask=key_mask is not None, has_sinks=sinks is not None)
    return attention_node(variant.op_type, [query, key, value, key_mask, sinks], attributes.as_onnx())


def _check_sizes(query: Tensor, key: Tensor, value: Tensor, heads: int, kv_heads: int) -> None:
    """Refuse heads of keys that do not divide those of queries, and values of another width."""
    if kv_heads == 0 or heads % kv_heads:
        raise UsageError(
            f"{heads} heads of queries cannot share {kv_heads} of keys.", why="Every head of keys serves as many."
        )
    if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        raise UsageError(
            f"Keys are {list(key.shape)} and values {list(value.shape)}, queries {query.shape[-1]} wide.",
            why="The node takes one width for all three.",
            fix="Append channels of zeros to the narrower ones, and cut the output.",
        )


def _length(query: Tensor, sequence_first: bool) -> int | None:
    """Return the length of the sequence; None of a dynamic one."""
    length = query.shape[1 if sequence_first else 2]
    return length if isinstance(length, int) else None


def attention_node(op_type: str, inputs: Sequence[Tensor | None], attributes: dict[str, Any]) -> Tensor:
    """Add a node to the graph, and return its output, of its first input's shape and type; inputs of None are left out.

    Shapes and meaning: `core.nodes`.
    """
    given = [x for x in inputs if x is not None]
    first = given[0]
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{op_type}", given, attributes, dtype=first.dtype, shape=first.shape, version=DOMAIN_VERSION
    )
