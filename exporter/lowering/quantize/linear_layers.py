"""Find the linear layers of a traced model whose matrices are worth storing in fewer bits."""

from __future__ import annotations

import onnx_ir as ir

# Narrower matrices (a gate per head, the weights of residual streams) take almost no time and are the most sensitive.
NARROWEST = 32


def linear_layers(model: ir.Model) -> list[ir.Node]:
    """List plain products with a constant matrix that is wide enough: `x·W`, or `x·Wᵀ` by Gemm."""
    found = []
    for node in model.graph:
        if node.domain or not (node.op_type == "MatMul" or _is_plain_gemm(node)):
            continue
        matrix = node.inputs[1]
        if matrix is None or not matrix.is_initializer() or matrix.shape is None:
            continue
        sizes = [size for size in matrix.shape if isinstance(size, int)]
        if len(sizes) == 2 and min(sizes) >= NARROWEST:
            found.append(node)
    return found


def is_transposed(node: ir.Node) -> bool:
    """Return whether a linear layer multiplies by the transposed matrix."""
    return "transB" in node.attributes and bool(node.attributes["transB"].as_int())


def _is_plain_gemm(node: ir.Node) -> bool:
    """Return whether a Gemm is `x·W` or `x·Wᵀ`."""
    factors = {name: node.attributes[name].value for name in ("alpha", "transA") if name in node.attributes}
    plain = factors.get("alpha", 1.0) == 1.0 and not factors.get("transA", 0)
    return node.op_type == "Gemm" and plain and all(value is None for value in node.inputs[2:])
