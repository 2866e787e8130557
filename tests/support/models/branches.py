"""A file whose weights lie in the branches of an If, and their data in another file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 64


def save_branches(path: Path, data: str) -> None:
    """Write a model `x [3, 64]` → `y`, `x` times a matrix of ones where the sum of `x` is above 0, else of twos."""

    def branch(number: float) -> onnx.GraphProto:
        weight = numpy_helper.from_array(np.full((WIDTH, WIDTH), number, np.float32), f"weight_{number}")
        made = helper.make_tensor_value_info(f"y_{number}", TensorProto.FLOAT, [3, WIDTH])
        node = helper.make_node("MatMul", ["x", weight.name], [made.name])
        return helper.make_graph([node], f"times_{number}", [], [made], [weight])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Constant", [], ["zero"], value_float=0.0),
        helper.make_node("Greater", ["sum", "zero"], ["above"]),
        helper.make_node("If", ["above"], ["y"], then_branch=branch(1.0), else_branch=branch(2.0)),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, WIDTH]) for name in ("x", "y"))
    graph = helper.make_graph(nodes, "branches", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=1024)
