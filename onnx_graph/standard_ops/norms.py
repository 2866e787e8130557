"""Replace LpNormalization by a norm and a division, for engines that lack this operator.

    y = x / n,   n = ‖x‖ where it is not 0, else 1

so that a vector of zeros stays one, as in onnxruntime. Source: ONNX, operator LpNormalization.
"""

from __future__ import annotations

from typing import Any

_REDUCTIONS = {1: "ReduceL1", 2: "ReduceL2"}
# From this opset on a reduction has its axes as an input.
_AXES_ARE_INPUT = 18


def without_lp_normalization(model: Any) -> None:
    """Replace each LpNormalization of an `onnx_ir.Model`, in place; one whose element type is not known stays."""
    import onnx_ir as ir

    opset = model.graph.opset_imports.get("", 0)
    for node in list(model.graph.all_nodes()):
        if node.op_type == "LpNormalization" and node.domain == "" and node.inputs[0].dtype is not None:
            nodes = _divided(node, opset)
            ir.convenience.replace_nodes_and_values(
                node.graph, node, [node], nodes, node.outputs, [nodes[-1].outputs[0]]
            )


def _divided(node: Any, opset: int) -> list[Any]:
    """Return nodes that compute the same as an LpNormalization."""
    import numpy as np
    import onnx_ir as ir

    x, dtype = node.inputs[0], node.inputs[0].dtype
    axis = node.attributes["axis"].value if "axis" in node.attributes else -1
    order = node.attributes["p"].value if "p" in node.attributes else 2
    made: list[Any] = []

    def add(op_type: str, inputs: list[Any], **attributes: Any) -> Any:
        one = ir.node(op_type, inputs, attributes, metadata_props=dict(node.metadata_props))
        made.append(one)
        return one.outputs[0]

    def constant(value: Any) -> Any:
        return add("Constant", [], value=ir.tensor(value))

    axes = {"axes": [axis]} if opset < _AXES_ARE_INPUT else {}
    inputs = [x] if axes else [x, constant(np.array([axis], dtype=np.int64))]
    norm = add(_REDUCTIONS[order], inputs, keepdims=1, **axes)
    zero, one = (constant(np.array(value, dtype=dtype.numpy())) for value in (0, 1))
    divisor = add("Where", [add("Equal", [norm, zero]), one, norm])
    add("Div", [x, divisor])
    return made
