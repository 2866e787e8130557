"""Read an ONNX file's message without the bytes of its large weights: enough to examine its graph."""

from __future__ import annotations

import mmap
from pathlib import Path

import onnx

from .judgement import tensors_of
from .wire_model import without_weights

# Tensors of this size in bytes or more are not loaded.
LARGE = 1 << 12
# The location that means the file itself.
_HERE = "\0"
_INDICES = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)


def read_message(path: Path) -> onnx.ModelProto:
    """Read a written file's message without the bytes of large weights; keep integers, which may be indices.

    The bytes that are left out are not read: weights of gigabytes take no memory.
    """
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        model: onnx.ModelProto = onnx.ModelProto.FromString(without_weights(mapped, _HERE, LARGE))
        for tensor in model.graph.initializer:
            if _lies_here(tensor) and tensor.data_type not in _INDICES:
                _forget_place(tensor)
        for tensor in filter(_lies_here, tensors_of(model)):
            places = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
            tensor.raw_data = mapped[places["offset"] : places["offset"] + places["length"]]
            _forget_place(tensor)
    return model


def _lies_here(tensor: onnx.TensorProto) -> bool:
    return any(entry.key == "location" and entry.value == _HERE for entry in tensor.external_data)


def _forget_place(tensor: onnx.TensorProto) -> None:
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
