"""Read an ONNX file's message without the bytes of its large weights: enough to examine its graph."""

from __future__ import annotations

from pathlib import Path

import onnx

# Bytes from which a tensor is left out of the message.
LARGE = 1 << 12
_INDICES = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)


def read_message(path: Path) -> onnx.ModelProto:
    """Read a written file's message without the bytes of its large weights; integers stay, as they may be indices."""
    whole, bare = onnx.load(path, load_external_data=False), onnx.ModelProto()
    for tensor in whole.graph.initializer:
        if len(tensor.raw_data) >= LARGE and tensor.data_type not in _INDICES:
            tensor.ClearField("raw_data")
    bare.CopyFrom(whole)  # a message's memory is only released as a whole
    return bare
