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
    temporary, places, offsets = folder / "weights", dict[str, int](), list[int]()
    large = [
        (value, tensor)
        for model in models
        for graph in model.graphs()
        for value in graph.initializers.values()
        if (tensor := value.const_value) is not None and tensor.nbytes >= _SMALLEST
    ]
    if not large:
        return None
    with temporary.open("wb") as stream:
        for _, tensor in large:
            content = tensor.tobytes()
            digest = hashlib.sha256(content).hexdigest()
            if digest not in places:
                stream.write(b"\0" * (-stream.tell() % _ALIGNMENT))
                places[digest] = stream.tell()
                stream.write(content)
            offsets.append(places[digest])
    name = f"{stem}.{sha256(temporary)[:12]}.data"
    temporary.rename(folder / name)
    for (value, tensor), offset in zip(large, offsets, strict=True):
        value.const_value = ir.ExternalTensor(
            name,
            offset,
            tensor.nbytes,
            tensor.dtype,
            shape=tensor.shape,  # type: ignore[arg-type]
            name=value.name or "",
            base_dir=folder,
        )
    return name
