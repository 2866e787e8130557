"""Check constants of a model that outputs hardly show, read off the graph.

What each norm adds before it divides: with 1e-5 for 1e-6 the outputs of most models change by less than any tolerance,
and those of an unusual input, of small numbers, by a tenth. And the frequencies of rotary embeddings: a base
that is 1 % off is within the error of bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import nn

from ...core.documents.sidecar import CheckRecord
from ...onnx_graph.standard_ops.names import MODULE
from .outcome import failed, not_proven, passed

CONSTANTS = "model constants"
# Names under which PyTorch's and transformers' norms have it.
_NAMES = ("variance_epsilon", "eps")
# What fp16 leaves of 1e-6, relative.
_ALIKE = 0.1
# A constant that is added in a norm and larger is something else, such as the 1 of `1 + weight`.
_LARGEST = 0.01
_NAMED = 3
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
# How a traced graph names the buffers of a model, and what fp16 leaves of one, relative.
_PREFIX, _EQUAL = "model.", 2e-3
# The buffers that are compared: a rotary embedding has a frequency for each pair of channels.
_FREQUENCIES = "inv_freq"


def check_constants(model: onnx.ModelProto, module: nn.Module) -> CheckRecord:
    """Compare the epsilons of a graph by the path of each norm, and its rotary frequencies, with the model's own.

    Args:
        model: the written file; its large weights may be absent.
        module: the user's own model, as transformers loads it.
    """
    stated = {path: eps for path, part in module.named_modules() if (eps := _epsilon(part)) is not None}
    found: dict[str, set[float]] = {}
    for path, value in _written(model):
        if path in stated:
            found.setdefault(path, set()).add(value)
    buffers = {
        f"{_PREFIX}{name}": x.double().numpy() for name, x in module.named_buffers() if name.endswith(_FREQUENCIES)
    }
    kept = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in buffers and _is_here(tensor)}
    if not found and not kept:
        return not_proven("the graph shows neither what norms add before they divide, nor rotary frequencies")
    wrong = [
        f"buffer {name.removeprefix(_PREFIX)} is off by {off:.2g} of the model's own"
        for name, tensor in kept.items()
        if not (off := _apart(numpy_helper.to_array(tensor), buffers[name])) <= _EQUAL
    ]
    wrong += [
        f"{path} adds {value:g} before it divides, and the model {stated[path]:g}"
        for path, values in found.items()
        for value in values
        if abs(value - stated[path]) > _ALIKE * stated[path]
    ]
    if wrong:
        more = f", and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        return failed(f"{'; '.join(wrong[:_NAMED])}{more}")
    values = ", ".join(f"{value:g}" for value in sorted({stated[path] for path in found}))
    words = [f"{len(found)} norms add what the model's own add before they divide: {values}"] if found else []
    words += [f"{len(kept)} rotary embeddings have the model's own frequencies"] if kept else []
    return passed("; ".join(words), norms=len(found), buffers=len(kept))


def _is_here(tensor: onnx.TensorProto) -> bool:
    """Return whether the bytes of a constant were read, and are of a type that numpy has."""
    return bool(tensor.raw_data or tensor.float_data) and tensor.data_type in _FLOATS


def _apart(found: NDArray[Any], own: NDArray[Any]) -> float:
    """Return the largest difference of two buffers, relative to the number itself."""
    if found.size != own.size:
        return float("nan")
    difference = np.abs(found.reshape(-1).astype(np.float64) - own.reshape(-1))
    return float((difference / np.maximum(np.abs(own.reshape(-1)), np.finfo(np.float32).tiny)).max(initial=0.0))


def _epsilon(part: nn.Module) -> float | None:
    """Return what a norm adds; None for another module."""
    if "norm" not in type(part).__name__.lower():
        return None
    values = (getattr(part, name, None) for name in _NAMES)
    return next((float(value) for value in values if isinstance(value, float) and value > 0), None)


def _written(model: onnx.ModelProto) -> Iterator[tuple[str, float]]:
    """Yield what the norms of a graph add, each with the path of its module."""
    constants = {
        tensor.name: float(numpy_helper.to_array(tensor).reshape(-1)[0])
        for tensor in model.graph.initializer
        if tensor.data_type in _FLOATS and not tensor.external_data and list(tensor.dims) in ([], [1])
    }
    for node in model.graph.node:
        path = next((entry.value for entry in node.metadata_props if entry.key == MODULE), "")
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                yield path, attribute.f
        if node.op_type == "Add":
            for name in node.input:
                if 0 < constants.get(name, 0) < _LARGEST:
                    yield path, constants[name]
