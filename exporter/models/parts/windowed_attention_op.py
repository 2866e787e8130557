"""Windowed attention for modules: the node while exporting, the PyTorch operator otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

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
from ....plugins import torch_op


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
        output: Tensor = torch_op.windowed_attention(
            query,
            key,
            value,
            key_mask,
            attn_bias,
            *astuple(geometry),
            scale,
            shared_qk,
            sequence_first,
            xpos_scale_base,
        )
        return output
    variant = NodeVariant(has_mask=key_mask is not None, has_bias=attn_bias is not None, has_xpos=bool(xpos_scale_base))
    length = query.shape[1 if sequence_first else 2]
    attributes = NodeAttributes(
        geometry,
        scale,
        shared_qk=shared_qk,
        perm=SEQUENCE_FIRST if sequence_first else HEADS_FIRST,
        query_block=choose_query_block(
            geometry, length if isinstance(length, int) else None, has_bias=attn_bias is not None
        ),
        xpos_scale_base=xpos_scale_base,
    )
    return attention_node(variant.op_type, [query, key, value, key_mask, attn_bias], attributes.as_onnx())


def attention_node(op_type: str, inputs: Sequence[Tensor | None], attributes: dict[str, Any]) -> Tensor:
    """Add a node to the graph, and return its output, of its first input's shape and type; inputs of None are left out.

    Shapes and meaning: `core.nodes`.
    """
    given = [x for x in inputs if x is not None]
    first = given[0]
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{op_type}", given, attributes, dtype=first.dtype, shape=first.shape, version=DOMAIN_VERSION
    )
