"""Pass: compute an activation times another value as one gated node."""

from __future__ import annotations

from typing import Any

from ...core.nodes.fused import FUSED_DOMAIN
from ..graph_values import replace_node
from .matching import attribute, maker, only_user

# Gelu's attribute `approximate` → the node.
_GELUS = {"none": "GatedGelu", "tanh": "GatedGeluTanh"}


def apply(model: Any) -> None:
    """Replace every gate of an `onnx_ir.Model`, in place."""
    for node in list(model.graph):
        if node.op_type == "Mul" and node.domain == "":
            for activated, value in (node.inputs, node.inputs[::-1]):
                op_type, gate = _activation(activated)
                if gate is not None and _alike(gate, value):
                    replace_node(node, op_type, [value, gate], domain=FUSED_DOMAIN)
                    break


def _activation(value: Any) -> tuple[str, Any]:
    """Return an activation's op type and input `gate`, if only a gate uses it; else `gate` is None."""
    if value is None or only_user(value, "Mul") is None:
        return "", None
    gelu = maker(value, "Gelu")
    if gelu is not None:
        return _GELUS[attribute(gelu, "approximate", "none")], gelu.inputs[0]
    product = maker(value, "Mul")
    for gate, other in () if product is None else (product.inputs, product.inputs[::-1]):
        sigmoid = maker(other, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is gate:
            return "GatedSilu", gate
    return "", None


def _alike(gate: Any, value: Any) -> bool:
    """Return whether both have the same shape; unknown sizes must have the same name."""
    known = value is not None and gate.shape is not None and value.shape is not None
    return (
        known
        and list(gate.shape) == list(value.shape)
        and None not in [getattr(size, "value", size) for size in gate.shape]
    )
