"""AFT-local's mean as one node, while exporting."""

from __future__ import annotations

import torch
from torch import Tensor

from ....core.nodes.aft import PLUGIN_ATTRIBUTES, aft_variant_for
from ....core.nodes.attention import DOMAIN, DOMAIN_VERSION


def aft_node(gate: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Add a node to the graph, `[T, B, D]` fp32 → the same; bias `[T, R]` and mask as in `core.nodes.aft`."""
    variant = aft_variant_for(causal=causal, has_mask=mask is not None)
    inputs = [gate, key, value, bias, *([] if mask is None else [mask])]
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{variant.op_type}",
        inputs,
        attrs=PLUGIN_ATTRIBUTES,
        dtype=gate.dtype,
        shape=gate.shape,
        version=DOMAIN_VERSION,
    )
