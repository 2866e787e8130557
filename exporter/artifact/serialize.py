"""Write a traced model as one ONNX file, one weight at a time.

onnx_ir builds the whole message and then its bytes, each with a copy of all weights. Here the message is built without
the large ones, and each of those is written to the stream in turn, so that only one tensor at a time is in memory.

Source of the layout: protocol buffers' wire format. A field is its key (`number · 8 + wire type`), and where it has a
length, the length and the content; lengths are base-128 varints; the order of fields is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir

from ...onnx_graph.without_weights import LARGE

_WITH_LENGTH = 2  # the wire type of messages and bytes


def write_model(model: ir.Model, path: Path) -> None:
    """Write the model with all of its weights inside the file.

    Raises:
        ValueError: a weight is not as long as its shape and type say.
    """
    large = _large_initializers(model)
    proto = message(model)
    tensors = {tensor.name: _header(tensor) for tensor in proto.graph.initializer if tensor.name in large}
    small = [tensor for tensor in proto.graph.initializer if tensor.name not in large]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(small)
    graph = proto.graph.SerializeToString()
    proto.ClearField("graph")
    # The bytes before each weight: the keys and lengths of its message and of its data.
    before = {name: _before(header, large[name].nbytes) for name, header in tensors.items()}
    length = len(graph) + sum(len(start) + large[name].nbytes for name, start in before.items())
    with path.open("wb") as stream:
        stream.write(proto.SerializeToString())
        stream.write(_key(onnx.ModelProto.GRAPH_FIELD_NUMBER) + _varint(length) + graph)
        for name, start in before.items():
            data = large[name].tobytes()
            if len(data) != large[name].nbytes:
                raise ValueError(f"{name} has {len(data)} bytes, not {large[name].nbytes}")
            stream.write(start)
            stream.write(data)


def message(model: ir.Model) -> onnx.ModelProto:
    """Build the model's message without the bytes of its large weights; their names, types and shapes stay."""
    with _without(model, _large_initializers(model)):
        return ir.serde.serialize_model(model)


def forget_weights(model: ir.Model) -> None:
    """Drop the bytes of the large weights of a written model; their names, types and shapes stay."""
    values = model.graph.initializers
    for name, tensor in _large_initializers(model).items():
        values[name].const_value = _without_bytes(name, tensor)


def _large_initializers(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    values = model.graph.initializers.items()
    return {
        name: value.const_value
        for name, value in values
        if value.const_value is not None
        and value.const_value.nbytes >= LARGE
        and value.const_value.dtype != ir.DataType.STRING
        and not isinstance(value.const_value, ir.ExternalTensor)
    }


@contextmanager
def _without(model: ir.Model, large: Mapping[str, ir.TensorProtocol]) -> Iterator[None]:
    """Replace these tensors by tensors without bytes while the context is open."""
    values = model.graph.initializers
    try:
        for name, tensor in large.items():
            values[name].const_value = _without_bytes(name, tensor)
        yield
    finally:
        for name, tensor in large.items():
            values[name].const_value = tensor


def _without_bytes(name: str, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor("", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)


def _header(tensor: onnx.TensorProto) -> bytes:
    """Encode a tensor's message without its data."""
    bare = onnx.TensorProto()
    bare.CopyFrom(tensor)
    bare.ClearField("external_data")
    bare.ClearField("data_location")
    data: bytes = bare.SerializeToString()
    return data


def _before(header: bytes, size: int) -> bytes:
    data = header + _key(onnx.TensorProto.RAW_DATA_FIELD_NUMBER) + _varint(size)
    return _key(onnx.GraphProto.INITIALIZER_FIELD_NUMBER) + _varint(len(data) + size) + data


def _key(number: int) -> bytes:
    return _varint(number << 3 | _WITH_LENGTH)


def _varint(value: int) -> bytes:
    """Encode a varint: seven bits per byte, lowest first; the eighth bit says that more bytes follow."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))
