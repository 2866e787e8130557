"""Windowed attention for modules: the node while exporting, the PyTorch operator otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from ....core.geometry import WindowGeometry
from ....core.nodes.attention import (
    DOMAIN,
    DOMAIN_VERSION,
    HEADS_FIRST,
    SEQUENCE_FIRST,
    NodeAttributes,
    check_xpos,
    choose_query_block,
    variant_for,
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
            geometry.window_size,
            geometry.look_backward,
            geometry.look_forward,
            geometry.causal,
            geometry.exact_windowsize,
            scale,
            shared_qk,
            sequence_first,
            xpos_scale_base,
        )
        return output
    variant = variant_for(has_mask=key_mask is not None, has_bias=attn_bias is not None, has_xpos=bool(xpos_scale_base))
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
    inputs = [query, key, value, *(x for x in (key_mask, attn_bias) if x is not None)]
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{variant.op_type}",
        inputs,
        attributes.as_onnx(),
        dtype=query.dtype,
        shape=query.shape,
        version=DOMAIN_VERSION,
    )
