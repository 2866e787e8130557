"""Store a traced model's linear layers in fp8 or int8, as operator pairs that TensorRT turns into 8-bit products.

TensorRT multiplies in 8 bits where both factors come from a QuantizeLinear and a DequantizeLinear whose scales are
constants. A constant scale of activations would need calibration on real inputs. So each row is divided by its largest
magnitude first, and the product multiplied by it again:

    a = max |x| of the row            fp32 or fp16, exact per token
    y = a · (DQ(Q(x / a, 1/m), 1/m) @ DQ(W8, w))

`m` is the largest number of the type, `w` has a scale for each column of the matrix. No token has a say in the scales
of another, and nothing is clipped.

Embeddings, attention, norms, residual streams, and matrices too narrow to be worth it stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ....onnx_graph.graph_values import add_constant, node_like
from .linear_layers import StoredMatrix, replace_layers


@dataclass(frozen=True)
class Kind:
    """An 8-bit type: its name in errors and in ONNX, and its largest number."""

    name: str
    dtype: ir.DataType
    largest: float


FP8 = Kind("fp8", ir.DataType.FLOAT8E4M3FN, 448.0)  # E4M3 without infinities
INT8 = Kind("int8", ir.DataType.INT8, 127.0)


def quantize(model: ir.Model, kind: Kind) -> ir.Model:
    """Store the model's linear layers in 8 bits, in place, and return the model.

    Args:
        model: traced, fp32 or fp16, with or without ONNX functions.
        kind: the type of 8 bits.

    Raises:
        ExportFailed: there is no linear layer, or a matrix contains NaN or infinity.
    """
    replace_layers(model, kind.name, partial(_stored, model, kind), partial(_replace, model, kind))
    return model


def _stored(model: ir.Model, kind: Kind, name: str, matrix: NDArray[Any]) -> list[ir.Value]:
    """Add the initializers of a matrix `[K, N]`: its numbers, a scale for each column, and zero points."""
    numbers = matrix.astype(np.float32)
    # As they are stored, so that the numbers are rounded by the scales they will be multiplied with.
    scales = (np.abs(numbers).max(0) / kind.largest).astype(matrix.dtype)
    scales = np.where(scales >= np.finfo(matrix.dtype).tiny, scales, np.ones_like(scales))
    rounded = np.clip(numbers / scales.astype(np.float32), -kind.largest, kind.largest)
    if kind is INT8:
        rounded = np.rint(rounded)
    eight = np.ascontiguousarray(rounded).astype(kind.dtype.numpy())
    zeros = np.zeros(scales.shape, kind.dtype.numpy())
    return [
        add_constant(model.graph, f"{name}.{kind.name}", eight),
        add_constant(model.graph, f"{name}.scales", scales),
        add_constant(model.graph, f"{name}.zeros", zeros),
    ]


def _replace(model: ir.Model, kind: Kind, node: ir.Node, matrix: StoredMatrix) -> None:
    """Replace a linear layer by the product of rounded factors; its result keeps name, type and shape."""
    source = node.inputs[0]
    assert source is not None and source.shape is not None and source.dtype is not None and node.graph is not None
    element = source.dtype
    scale = add_constant(model.graph, f"rows.{kind.name}.scale", np.array(1 / kind.largest, element.numpy()))
    zero = add_constant(model.graph, f"rows.{kind.name}.zero", np.array(0, kind.dtype.numpy()))
    # A row of zeros is divided by this.
    least = add_constant(model.graph, "rows.least", np.array(np.finfo(element.numpy()).tiny, element.numpy()))
    last = add_constant(model.graph, "rows.axis", np.array([-1], np.int64))
    made: list[ir.Node] = []

    def add(op: str, inputs: list[ir.Value], shape: Any, dtype: ir.DataType = element, **attributes: Any) -> ir.Value:
        made.append(node_like(node, op, inputs, shape, dtype, f"{node.name}.{len(made)}", **attributes))
        return made[-1].outputs[0]  # type: ignore[no-any-return]

    whole = list(source.shape)
    row = [*whole[:-1], 1]
    largest = add("ReduceMax", [add("Abs", [source], whole), last], row, keepdims=1)
    factor = add("Max", [largest, least], row)
    scaled = add("Div", [source, factor], whole)
    rounded = add("QuantizeLinear", [scaled, scale, zero], whole, kind.dtype)
    again = add("DequantizeLinear", [rounded, scale, zero], whole)
    weights = add("DequantizeLinear", matrix.initializers, [matrix.rows, matrix.columns], axis=1)
    result = [*whole[:-1], matrix.columns]
    add("Mul", [add("MatMul", [again, weights], result), factor], result)
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, node.outputs, made[-1].outputs)
