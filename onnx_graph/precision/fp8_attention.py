"""Let attention nodes read fp8: keep the nodes that quantise their inputs, remove those that dequantise them.

A file says that attention may be computed in fp8 by pairs around query, key and value, as TensorRT wants them:

    x → QuantizeLinear (E4M3, scale s) → DequantizeLinear (s) → attention

Everywhere but in the plugin library these are the mathematics. The library's kernels take the numbers of QuantizeLinear
themselves. Scores are linear in query and key, the output is in the value: so the scales of the first two become
factors of the node's `scale`, and the output, which is fp16, is multiplied by the third.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.nodes.gpu import computes_in_fp8
from ..gpu_nodes import GpuNode, gpu_nodes
from ..graph_values import set_nodes

_E4M3, _FP16 = 17, 10  # onnx.TensorProto.DataType


class _Pair(NamedTuple):
    """Describe fp8 numbers: their name, their scale, and the element type that DequantizeLinear returns."""

    numbers: str
    scale: float
    dtype: int


def apply(model: Any) -> Any:
    """Return a model whose attention nodes read fp8, or the model itself where none has such inputs.

    Nodes that no kernel of fp8 computes stay as they are: with more inputs than a key mask, with wide heads, or with
    scales that are not one constant for each of the three.
    """
    import onnx

    found = _found(model)
    if not found:
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph, nodes = changed.graph, []
    shapes = {value.name: value.type.tensor_type for value in (*model.graph.value_info, *model.graph.input)}
    for index, node in enumerate(graph.node):
        nodes.append(node)
        if index in found:
            query, key, value = found[index]
            declared = graph.value_info.add(name=query.numbers)
            declared.type.tensor_type.CopyFrom(shapes[node.input[0]])
            declared.type.tensor_type.elem_type = _E4M3
            node.input[:3] = [query.numbers, key.numbers, value.numbers]
            next(attribute for attribute in node.attribute if attribute.name == "scale").f *= query.scale * key.scale
            nodes += _multiplied(graph, node, value)
    used = {name for node in nodes for name in node.input} | {value.name for value in graph.output}
    set_nodes(graph, [node for node in nodes if node.op_type != "DequantizeLinear" or node.output[0] in used])
    return changed


def _found(model: Any) -> dict[int, list[_Pair]]:
    """Return the pairs before query, key and value of the nodes that can read fp8, by the node's place."""
    if not any(node.op_type == "QuantizeLinear" for node in model.graph.node):
        return {}
    makers = {output: node for node in model.graph.node for output in node.output}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    places = {node.output[0]: index for index, node in enumerate(model.graph.node)}
    declared = {value.name for value in (*model.graph.value_info, *model.graph.input)}
    found = {}
    for node in gpu_nodes(model):
        pairs = [_pair(makers.get(name), makers, constants) for name in node.proto.input[:3]]
        whole = [pair for pair in pairs if pair is not None]
        if len(whole) == 3 and _has_kernel(node) and node.proto.input[0] in declared:
            found[places[node.proto.output[0]]] = whole
    return found


def _has_kernel(node: GpuNode) -> bool:
    """Return whether there is an fp8 kernel for a node's options and head size."""
    shared_qk = any(attribute.name == "shared_qk" and attribute.i for attribute in node.proto.attribute)
    return node.head_dim is not None and computes_in_fp8(node.proto.op_type, node.head_dim, shared_qk=shared_qk)


def _pair(last: Any, makers: dict[str, Any], constants: dict[str, Any]) -> _Pair | None:
    """Return the numbers in fp8 that a DequantizeLinear reads, with one scale for all; None if it is something else."""
    from onnx import numpy_helper

    if last is None or last.op_type != "DequantizeLinear" or last.input[1] not in constants:
        return None
    first, scale = makers.get(last.input[0]), constants[last.input[1]]
    if first is None or first.op_type != "QuantizeLinear" or not _is_e4m3(first, constants):
        return None
    numbers = numpy_helper.to_array(scale)
    return _Pair(first.output[0], float(numbers.reshape(())), scale.data_type) if numbers.size == 1 else None


def _is_e4m3(node: Any, constants: dict[str, Any]) -> bool:
    """Return whether a QuantizeLinear makes E4M3: its zero point says so, or, without one, an attribute."""
    if len(node.input) > 2 and node.input[2] in constants:
        return bool(constants[node.input[2]].data_type == _E4M3)
    return any(attribute.name == "output_dtype" and attribute.i == _E4M3 for attribute in node.attribute)


def _multiplied(graph: Any, node: Any, value: _Pair) -> list[Any]:
    """Return the nodes that turn the new fp16 output into the old one: a Mul, and a Cast if the type differs."""
    import numpy as np
    from onnx import helper, numpy_helper

    output, name = node.output[0], f"{node.output[0]}.in_fp8"
    node.output[0], made = name, []
    if value.dtype != _FP16:
        made.append(helper.make_node("Cast", [name], [f"{name}.cast"], name=f"{node.name}.cast", to=value.dtype))
        name = f"{name}.cast"
    factor = np.array(value.scale, helper.tensor_dtype_to_np_dtype(value.dtype))
    graph.initializer.append(numpy_helper.from_array(factor, f"{output}.value_scale"))
    return [*made, helper.make_node("Mul", [name, f"{output}.value_scale"], [output], name=f"{node.name}.value_scale")]
