"""Read an ONNX model with onnx's parser into a canonical form, in which every part is judged.

Fields that onnx does not know, and graphs for training, are dropped. The domain "ai.onnx" becomes "", and each operator
set is imported once. Tensors name external data only if their data lies there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from . import judgement, wire_model
from .graph_values import all_graphs

# Messages that take most memory.
_LARGE = frozenset(
    (
        *("GraphProto", "NodeProto", "FunctionProto", "AttributeProto"),
        *("TensorProto", "SparseTensorProto", "TrainingInfoProto", "ValueInfoProto", "TypeProto"),
    )
)


def canonical(content: bytes) -> Any:
    """Parse the bytes of a model into a new `onnx.ModelProto` in its canonical form.

    Raises:
        ValueError: the bytes are not a model.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        wire_model.check_parts(content, _kinds(), "ModelProto", _LARGE)
        # Not `onnx.load(path)`, which reads a file named .json or .txt as another format.
        model = onnx.load_model_from_string(content)
    except wire_model.TooMany:
        raise
    except (DecodeError, ValueError) as error:
        raise ValueError("It is incomplete, or is another kind of file.") from error
    if not model.HasField("graph") or not model.ir_version:
        # An empty file, and some others, parse as an empty message.
        raise ValueError("It has no graph.")
    judgement.check_count(model)
    if any(isinstance(name, bytes) for name in _names(model)):  # protobuf's error for other bytes
        raise ValueError("Its names are not in UTF-8.")
    _normalise(model)
    return model


@cache
def _kinds() -> dict[str, dict[int, str]]:
    """Return the kinds of messages in a model, each with its fields that are messages: number → kind."""
    import onnx

    found: dict[str, dict[int, str]] = {}
    waiting = [onnx.ModelProto.DESCRIPTOR]
    while waiting:
        kind = waiting.pop()
        inner = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
        found[kind.name] = {number: message.name for number, message in inner.items()}
        waiting += [message for message in inner.values() if message.name not in found]
    return found


def _names(model: Any) -> Iterator[Any]:
    """Yield the names that connect the parts of a model."""
    for body in (model.graph, *model.functions):
        if body is not model.graph:
            yield from (body.name, body.domain, body.overload, *body.input, *body.output)
        for graph in all_graphs(body):
            if graph is not body or body is model.graph:
                yield from (value.name for value in (*graph.input, *graph.output))
            for node in graph.node:
                yield from (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
                yield from (attribute.name for attribute in node.attribute)
    for tensor in judgement.tensors_of(model):
        yield tensor.name
        yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))
    for body in (model, *model.functions):
        yield from (entry.domain for entry in body.opset_import)


def _normalise(model: Any) -> None:
    model.ClearField("training_info")
    model.DiscardUnknownFields()
    _import_once(model)
    for body in (model.graph, *model.functions):
        for graph in all_graphs(body):
            graph.DiscardUnknownFields()  # from the model it reaches only so deep
            for node in graph.node:
                _rename(node)
    for function in model.functions:
        _rename(function)
        _import_once(function)
    for tensor in judgement.tensors_of(model):
        if tensor.data_location != tensor.EXTERNAL:
            tensor.ClearField("external_data")


def _rename(entry: Any) -> None:
    if entry.domain != judgement.domain_of(entry):
        entry.domain = judgement.domain_of(entry)


def _import_once(body: Any) -> None:
    """Import each operator set once.

    Raises:
        ValueError: one is imported in two versions.
    """
    versions: dict[str, int] = {}
    for entry in body.opset_import:
        _rename(entry)
        if versions.setdefault(entry.domain, entry.version) != entry.version:
            raise ValueError(f"It imports two versions of the operators of {entry.domain or 'ONNX'!r}.")
    if len(versions) < len(body.opset_import):
        kept = list(_first(body.opset_import))
        del body.opset_import[:]
        body.opset_import.extend(kept)


def _first(imports: Any) -> Iterator[Any]:
    seen = set()
    for entry in imports:
        if entry.domain not in seen:
            seen.add(entry.domain)
            copy = type(entry)()
            copy.CopyFrom(entry)
            yield copy
