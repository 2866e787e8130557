"""Pass: divide by a root instead of multiplying by its reciprocal.

PyTorch's `rsqrt` becomes Sqrt, Reciprocal and Mul. onnxruntime has one operator for the norm `x / √(mean(x²) + ε) · w`,
which it only finds as a division.
"""

from __future__ import annotations

from typing import Any

from ..graph_values import replace_node
from .matching import maker


def apply(model: Any) -> None:
    """Rewrite every product with the reciprocal of a root of an `onnx_ir.Model`, in place."""
    for node in list(model.graph):
        if node.op_type != "Mul" or node.domain:
            continue
        for place, value in enumerate(node.inputs):
            inverse = maker(value, "Reciprocal")
            if inverse is not None and maker(inverse.inputs[0], "Sqrt") is not None:
                replace_node(node, "Div", [node.inputs[1 - place], inverse.inputs[0]])
                break
