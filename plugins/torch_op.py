"""Define the PyTorch operator of windowed attention, with its plain reference.

`torch.ops.localattn.windowed_attention` is what the export-friendly modules call. On a GPU the kernel of
`kernel` computes it, where it can. The reference below computes it everywhere else; it takes a few windows of
queries at a time, so that memory stays linear in the sequence length.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from ..core.geometry import WindowGeometry
from ..core.nodes.attention import HEADS_FIRST, LOWEST_BIAS, SELF_SCORE, SEQUENCE_FIRST, NodeAttributes, check_xpos
from ..core.nodes.gpu import KernelAttributes
from .kernel.spec import LARGEST_HEAD_DIM, SMALLEST_HEAD_DIM, why_unsupported

# Queries per step of the reference: enough for efficient matrix products, few enough for small scores.
_REFERENCE_BLOCK = 512


@torch.library.custom_op("localattn::windowed_attention", mutates_args=())
def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    attn_bias: Tensor | None,
    window_size: int,
    look_backward: int,
    look_forward: int,
    causal: bool,
    exact_windowsize: bool,
    scale: float,
    shared_qk: bool,
    sequence_first: bool,
    xpos_scale_base: float,
) -> Tensor:
    """Compute the attention of every query to its visible keys; shapes and meaning as in `core.nodes.attention`.

    Args:
        query: `[B, N, H, D]` if `sequence_first`, else `[B, H, N, D]`; key and value alike.
        key: as query; already rotated and, for shared_qk, normalised.
        value: as query.
        key_mask: bool `[B, N]`, True = keep.
        attn_bias: `[H, window_size, K]`.
        window_size: queries per window.
        look_backward: windows seen before a query's own.
        look_forward: windows seen after it.
        causal: no later key is seen.
        exact_windowsize: limit distances instead of whole windows.
        scale: factor of the scores.
        shared_qk: a token's score with itself becomes `SELF_SCORE`.
        sequence_first: layout, see query.
        xpos_scale_base: base of the xpos decay, 0 without.
    """
    geometry = WindowGeometry(window_size, look_backward, look_forward, causal, exact_windowsize)
    perm = SEQUENCE_FIRST if sequence_first else HEADS_FIRST
    attributes = NodeAttributes(geometry, scale, shared_qk=shared_qk, perm=perm, xpos_scale_base=xpos_scale_base)
    return _reference(query, key, value, key_mask, attn_bias, attributes)


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    attn_bias: Tensor | None,
    attributes: NodeAttributes,
) -> Tensor:
    """Compute the operator in plain PyTorch, scores and softmax in at least fp32, for any device and head size."""
    geometry, xpos_scale_base = attributes.geometry, attributes.xpos_scale_base
    window, sequence_first = geometry.window_size, attributes.perm == SEQUENCE_FIRST
    if sequence_first:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    length, head_dim = query.shape[2:]
    precise = torch.promote_types(query.dtype, torch.float32)
    bias = None if attn_bias is None else attn_bias.to(precise).clamp_min(LOWEST_BIAS)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for start in range(0, length, _REFERENCE_BLOCK):
        rows = torch.arange(start, min(start + _REFERENCE_BLOCK, length))
        first, end = geometry.visible_interval(rows.numpy(), length)
        columns = torch.arange(int(first[0]), int(end[-1]))
        queries, keys = query[:, :, rows].to(precise), key[:, :, columns].to(precise)
        if xpos_scale_base:
            centre = 0.5 * float(rows[0] + rows[-1])
            ahead = rows + geometry.forward_reach - centre
            queries = queries * xpos_factor(head_dim, ahead, xpos_scale_base).to(queries)
            keys = keys * xpos_factor(head_dim, centre - columns, xpos_scale_base).to(keys)
        scores = queries @ keys.transpose(-1, -2) * attributes.scale
        if bias is not None:
            slot = columns[None, :] - (rows[:, None] // window - geometry.look_backward) * window
            scores = scores + bias[:, (rows % window)[:, None], slot.clamp(0, geometry.keys_per_window - 1)]
        if attributes.shared_qk:
            itself = columns[None, :] == rows[:, None]
            scores = scores.masked_fill(itself.to(scores.device), SELF_SCORE)
        visible = torch.from_numpy(geometry.visibility(rows.numpy(), columns.numpy(), length)).to(scores.device)
        if key_mask is not None:
            visible = visible & key_mask[:, None, None, columns]
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        weights = weights.masked_fill(~visible, 0.0)  # a row without visible keys is all NaN: make it zeros
        output[:, :, rows] = (weights @ value[:, :, columns].to(precise)).to(value.dtype)
    return output.transpose(1, 2).contiguous() if sequence_first else output


def xpos_factor(head_dim: int, distance: Tensor, base: float) -> Tensor:
    """Return `ζ_c^(distance / base)`, fp64 `[len(distance), head_dim]`, a formula of `core.nodes.attention`.

    Raises:
        UsageError: `head_dim` is odd or below 2.
    """
    check_xpos(head_dim)
    channel = torch.arange(0, head_dim, 2, dtype=torch.float64)
    zeta = (channel + 0.4 * head_dim) / (1.4 * head_dim)
    factor = zeta ** (distance.double()[:, None] / base)
    return torch.cat((factor, factor), dim=-1)


@windowed_attention.register_fake
def _(query: Tensor, *_rest: object, **_options: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@windowed_attention.register_kernel("cuda")
def _on_gpu(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, attn_bias: Tensor | None, *options: Any
) -> Tensor:
    """Compute the operator by the kernel, or by the reference if no kernel supports the case."""
    *window, scale, shared_qk, sequence_first, xpos_scale_base = options  # the operator's, after its tensors
    perm = SEQUENCE_FIRST if sequence_first else HEADS_FIRST
    attributes = NodeAttributes(WindowGeometry(*window), scale, shared_qk, perm, xpos_scale_base=xpos_scale_base)
    if why_no_kernel(query, attributes):
        return _reference(query, key, value, key_mask, attn_bias, attributes)
    from .kernel.launch import launch

    return launch(query, key, value, key_mask, attn_bias, attributes)


def why_no_kernel(query: Tensor, attributes: KernelAttributes) -> str:
    """Return why the kernel does not support a case on a GPU; empty if it does.

    Args:
        query: in the layout of `attributes.perm`.
        attributes: window, scale and layout.
    """
    batch, heads, length, head_dim = (query.shape[axis] for axis in attributes.perm)
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernel does not support {query.dtype}"
    if not SMALLEST_HEAD_DIM <= head_dim <= LARGEST_HEAD_DIM:
        return f"the kernel supports head sizes {SMALLEST_HEAD_DIM} to {LARGEST_HEAD_DIM}, not {head_dim}"
    if query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "the kernel needs a GPU of compute capability 8.0 or later"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return why_unsupported(attributes, batch=batch, heads=heads, length=length)
