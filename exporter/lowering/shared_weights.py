"""Write one file of weights for several graphs, with common weights stored once.

An ONNX file has one graph, and the graphs of a step and of a chunk differ in their static shapes, but their weights are
the same. Each graph refers to its tensors by offset in the common file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from ...core.storage.files import sha256

# Smaller tensors stay in the graphs, because shape inference and constant folding read them.
_SMALLEST = 1024
# Page size: runtimes map the file, so each tensor begins on a page.
_ALIGNMENT = 4096


def share_weights(models: Sequence[ir.Model], folder: Path, stem: str) -> str | None:
    """Move the models' large initializers into one file, storing equal ones once.

    Args:
        models: changed in place: their initializers refer to the file in `folder`.
        folder: where the file is written.
        stem: beginning of the file's name; a fingerprint of the content follows, so that an older model keeps its own.

    Returns:
        The file's name; None if no initializer is large.
    """
    temporary, places = folder / "weights", dict[str, int]()
    values = [
        value
        for model in models
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None and value.const_value.nbytes >= _SMALLEST
    ]
    if not values:
        return None
    with temporary.open("wb") as stream:
        for value in values:
            content = _tensor(value).tobytes()
            digest = hashlib.sha256(content).hexdigest()
            if digest in places:
                continue
            stream.write(b"\0" * (-stream.tell() % _ALIGNMENT))
            places[digest] = stream.tell()
            stream.write(content)
    name = f"{stem}.{sha256(temporary)[:12]}.data"
    temporary.rename(folder / name)
    for value in values:
        tensor = _tensor(value)
        value.const_value = ir.ExternalTensor(
            name,
            places[hashlib.sha256(tensor.tobytes()).hexdigest()],
            tensor.nbytes,
            tensor.dtype,
            shape=tensor.shape,  # type: ignore[arg-type]
            name=value.name or "",
            base_dir=folder,
        )
    return name


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value
