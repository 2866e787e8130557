"""A copy of a model without functions, for a provider that takes none.

onnxruntime shows a graph to its providers before it inlines functions. Its TensorRT provider makes a model of that
graph to ask TensorRT which nodes it takes, and leaves the functions out of it: such a model is not valid, and the
session ends there with "is not a registered function/op" (onnxruntime 1.31.1, `GetSupportedList`). Weights in other
files come into the copy, for TensorRT's parser would look for them beside a file that it is not told of.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .facts import read_model

TOO_LARGE = "Its weights are more than 2 GB, which no ONNX model in memory holds."
_MOST_BYTES = (1 << 31) - (1 << 20)  # protobuf's limit, and room for the bodies
# Larger tensors wait outside while functions are inlined; smaller ones may be shapes, which inference reads.
_WEIGHTS_FROM = 1024


def without_functions(model: str | bytes) -> tuple[bytes | None, set[str]]:
    """The copy of a model, serialized, and the element types of its inputs and weights as numpy names them.

    No copy is made of a model without functions: None.

    Args:
        model: path of an ONNX file, or its bytes, which then hold its weights.

    Raises:
        UsageError: it is no ONNX model.
        ValueError: `TOO_LARGE`.
        OSError: its external data cannot be read.
    """
    document = parsed(model)
    types = element_types(document)
    if not document.functions:
        return None, types
    if isinstance(model, str):
        _read_weights(document, Path(model).parent)
    weights = take_weights(document)
    plain = inlined(document)
    put_back(plain, weights)
    serialized: bytes = plain.SerializeToString()
    return serialized, types


def _read_weights(model: Any, folder: Path) -> None:
    """Bring external data into the model."""
    import onnx

    outside = [x for x in model.graph.initializer if x.data_location == onnx.TensorProto.EXTERNAL]
    lengths = (int(entry.value) for tensor in outside for entry in tensor.external_data if entry.key == "length")
    if sum(lengths) + model.ByteSize() > _MOST_BYTES:
        raise ValueError(TOO_LARGE)
    if outside:
        onnx.load_external_data_for_model(model, str(folder))


def element_types(model: Any) -> set[str]:
    """The element types of a model's inputs and weights, as numpy names them."""
    import onnx

    kinds = {tensor.data_type for tensor in model.graph.initializer}
    kinds |= {value.type.tensor_type.elem_type for value in model.graph.input}
    names = {onnx.TensorProto.DataType.Name(kind).lower() for kind in kinds}
    return {{"float": "float32", "double": "float64"}.get(name, name) for name in names}


def parsed(model: str | bytes) -> Any:
    """The `onnx.ModelProto` of a path or of bytes."""
    import onnx

    return read_model(Path(model)) if isinstance(model, str) else onnx.load_model_from_string(model)


def inlined(model: Any) -> Any:
    """The model, or one with the bodies of its functions where they were called."""
    import onnx.inliner

    return onnx.inliner.inline_local_functions(model) if model.functions else model


def graphs_of(node: Any) -> Iterator[Any]:
    """The graphs inside a node of control flow."""
    for attribute in node.attribute:
        yield from attribute.graphs
        if attribute.HasField("g"):
            yield attribute.g


def types_of(graph: Any) -> Iterator[tuple[str, int]]:
    """Name and element type of the values of a graph and of the graphs inside its nodes."""
    for value in (*graph.value_info, *graph.input, *graph.output):
        yield value.name, value.type.tensor_type.elem_type
    for tensor in graph.initializer:
        yield tensor.name, tensor.data_type
    for node in graph.node:
        for inner in graphs_of(node):
            yield from types_of(inner)


def take_weights(model: Any) -> dict[str, bytes]:
    """Take the numbers of large tensors out of a model, name → bytes, so that copying it is cheap."""
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
