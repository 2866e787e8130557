"""Read and change graphs for passes: inner graphs, element types, weights put aside, added constants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .judgement import graphs_of

# Tensors of this size in bytes or more are put aside while a model is copied; smaller ones may be shapes, which
# inference reads.
_WEIGHTS_FROM = 1024
# The version of each operator set, other than ONNX's own, whose nodes passes add.
_VERSION = 1


def all_nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph or function, and of the graphs inside its If, Loop and Scan."""
    for node in graph.node:
        yield node
        for inner in graphs_of(node):
            yield from all_nodes(inner)


def all_graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph and the graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for inner in graphs_of(node):
            yield from all_graphs(inner)


def reads(node: Any) -> Iterator[str]:
    """Yield the names that a node reads, including graphs inside it."""
    yield from node.input
    for graph in graphs_of(node):
        yield from (value.name for value in graph.output)
        for inner in graph.node:
            yield from reads(inner)


def set_nodes(graph: Any, nodes: Iterable[Any]) -> None:
    """Replace the nodes of a graph or function by these, which may include old ones."""
    whole = list(nodes)
    del graph.node[:]
    graph.node.extend(whole)


def rename_inputs(node: Any, names: Mapping[str, str]) -> None:
    """Make a node, and the graphs inside it, read other values: `names` maps old names to new ones."""
    node.input[:] = [names.get(name, name) for name in node.input]
    for graph in graphs_of(node):
        rename_reads(graph, names)


def rename_reads(graph: Any, names: Mapping[str, str]) -> None:
    """Make a graph inside a node read other values of the graphs around it, as `rename_inputs`."""
    for node in graph.node:
        rename_inputs(node, names)
    for value in graph.output:
        value.name = names.get(value.name, value.name)


def all_weights(graph: Any) -> Iterator[Any]:
    """Yield the initializers of a graph, and of the graphs inside its nodes."""
    for inner in all_graphs(graph):
        yield from inner.initializer


def outside_weights(model: Any) -> list[Any]:
    """List the initializers of a model whose data is in another file."""
    return [tensor for tensor in all_weights(model.graph) if tensor.data_location == tensor.EXTERNAL]


def external_files(model: Any) -> list[str]:
    """List the files with a model's weights, by their names in the model."""
    return sorted({x.value for tensor in outside_weights(model) for x in tensor.external_data if x.key == "location"})


def types_of(graph: Any) -> Iterator[tuple[str, int]]:
    """Yield name and element type of the values of a graph and of the graphs inside its nodes."""
    for inner in all_graphs(graph):
        for value in (*inner.value_info, *inner.input, *inner.output):
            yield value.name, value.type.tensor_type.elem_type
        for tensor in inner.initializer:
            yield tensor.name, tensor.data_type


def element_types(model: Any) -> set[str]:
    """Return the element types of a model's inputs and weights, as numpy names them."""
    import onnx

    kinds = {tensor.data_type for tensor in model.graph.initializer}
    kinds |= {value.type.tensor_type.elem_type for value in model.graph.input}
    names = {onnx.TensorProto.DataType.Name(kind).lower() for kind in kinds}
    return {{"float": "float32", "double": "float64"}.get(name, name) for name in names}


def add_constant(graph: Any, name: str, array: Any, dtype: Any = None) -> Any:
    """Add an initializer to an `onnx_ir.Graph` and return its value; return an existing one of this name.

    Args:
        graph: changed in place.
        name: of the initializer.
        array: its numbers.
        dtype: its `onnx_ir.DataType`; None: the array's type.
    """
    import onnx_ir as ir

    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.tensor(array, dtype=dtype, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def node_like(
    node: Any, op_type: str, inputs: Sequence[Any], shape: Any, dtype: Any, name: str | None = None, **attributes: Any
) -> Any:
    """Make a standard node with the metadata of another `onnx_ir.Node`; it belongs to no graph yet.

    Args:
        node: whose metadata it gets.
        op_type: its op type.
        inputs: its inputs.
        shape: sizes of its one result.
        dtype: `onnx_ir.DataType` of the result.
        name: of the node and of its result; None leaves both to whoever adds it to a graph.
        attributes: its attributes.
    """
    import onnx_ir as ir

    result = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    properties = dict(node.metadata_props)
    return ir.node(op_type, inputs, attributes, name=name, metadata_props=properties, outputs=[result])


def replace_node(
    node: Any, op_type: str, inputs: Sequence[Any], *, domain: str = "", name: str | None = None, **attributes: Any
) -> None:
    """Replace an `onnx_ir.Node` in its graph by another node.

    It gets the metadata of the old one, and its result the name, shape and type of the old one's. The graph then
    imports the operator set of its domain.

    Args:
        node: the old node.
        op_type: op type of the new one.
        inputs: its inputs.
        domain: its domain.
        name: its name; None leaves it to the graph.
        attributes: its attributes.
    """
    import onnx_ir as ir

    properties = dict(node.metadata_props)
    made = ir.node(op_type, inputs, attributes, domain=domain, name=name, metadata_props=properties)
    if domain:  # the standard operator set is imported, in the model's version
        node.graph.opset_imports.setdefault(domain, _VERSION)
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], [made], node.outputs, made.outputs)


def take_weights(model: Any) -> dict[str, bytes]:
    """Remove the data of large tensors from a model, name → bytes, so that copying it is cheap."""
    weights = {}
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= _WEIGHTS_FROM:
            weights[tensor.name] = tensor.raw_data
            tensor.ClearField("raw_data")
    return weights


def put_back(model: Any, weights: dict[str, bytes]) -> None:
    """Undo `take_weights`, on the model or a copy of it."""
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.raw_data = weights[tensor.name]
