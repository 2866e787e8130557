"""Windowed attention for modules that compute a few tokens: the step node while exporting, else plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....core.nodes.attention import DOMAIN, DOMAIN_VERSION
from ....core.nodes.step import StepAttributes, StepVariant
from .step_tables import StepTables


def step_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    caches: Sequence[Tensor],
    view: StepTables,
    attributes: StepAttributes,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output and the two caches of the next call; shapes and meaning as in `core.nodes.step`.

    It becomes a grouped node where heads share keys, scores are capped or hidden by padding, or there are sinks.
    """
    # The caches of a bf16 file are fp32, as are all its inputs and outputs; their values are bf16 numbers.
    key, value = (x.to(cache.dtype) for x, cache in zip((key, value), caches, strict=True))
    if not torch.onnx.is_in_onnx_export():
        return _plainly(query, key, value, caches, view, attributes, sinks)
    shares = query.shape[1] != key.shape[1] or view.score_bias.dim() == 4
    grouped = shares or bool(attributes.softcap) or sinks is not None
    variant = StepVariant(
        chunked=query.shape[2] > 1,
        has_xpos=bool(attributes.xpos_scale_base),
        grouped=grouped,
        has_softcap=bool(attributes.softcap),
        has_sinks=sinks is not None,
    )
    output, next_key, next_value = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{variant.op_type}",
        [query, key, value, *caches, view.score_bias, view.write_index, *view.scales]
        + ([] if sinks is None else [sinks.to(query.dtype)]),
        attributes.as_onnx(variant),
        dtypes=(query.dtype, *(x.dtype for x in caches)),
        shapes=(query.shape, *(x.shape for x in caches)),
        version=DOMAIN_VERSION,
    )
    return output, next_key, next_value


def _plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    caches: Sequence[Tensor],
    view: StepTables,
    attributes: StepAttributes,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the node's formula in PyTorch; tests compare the exported ONNX function with it."""
    if query.shape[2] > 1:
        keys, values = torch.cat((caches[0], key), dim=2), torch.cat((caches[1], value), dim=2)
        next_key, next_value = keys[:, :, view.write_index], values[:, :, view.write_index]
    else:
        place = view.write_index.unbind(-1)
        keys = next_key = caches[0].index_put(place, key)
        values = next_value = caches[1].index_put(place, value)
    precise, keys, values = query.float(), keys.float(), values.float()
    if view.scales:
        keys = keys * view.scales[-1]
    if len(view.scales) > 1:
        precise = precise * view.scales[0]
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    scores = precise @ keys.transpose(-1, -2) * attributes.scale
    if attributes.softcap:
        scores = (scores / attributes.softcap).tanh() * attributes.softcap
    scores = scores + view.score_bias
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return (weights @ values).to(query.dtype), next_key, next_value
