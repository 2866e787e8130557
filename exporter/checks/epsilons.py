"""Check the small number that each norm adds before it divides, read off the graph: outputs hardly show it.

With 1e-5 for 1e-6 the outputs of most models change by less than any tolerance, and those of an unusual input, of
small numbers, by a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import numpy_helper
from torch import nn

from ...core.documents.sidecar import CheckRecord
from ...onnx_graph.standard_ops.names import MODULE
from .outcome import failed, not_proven, passed

EPSILONS = "norm epsilons"
# Names under which PyTorch's and transformers' norms have it.
_NAMES = ("variance_epsilon", "eps")
# What fp16 leaves of 1e-6, relative.
_ALIKE = 0.1
# A constant that is added in a norm and larger is something else, such as the 1 of `1 + weight`.
_LARGEST = 0.01
_NAMED = 3


def check_epsilons(model: onnx.ModelProto, module: nn.Module) -> CheckRecord:
    """Compare the epsilons of a graph with those of the user's own model, by the path of each norm.

    Args:
        model: the written file; its large weights may be absent.
        module: the user's own model, as transformers loads it.
    """
    stated = {path: eps for path, part in module.named_modules() if (eps := _epsilon(part)) is not None}
    found: dict[str, set[float]] = {}
    for path, value in _written(model):
        if path in stated:
            found.setdefault(path, set()).add(value)
    if not found:
        return not_proven("no norm of the graph shows what it adds before it divides")
    wrong = [
        f"{path} adds {value:g} before it divides, and the model {stated[path]:g}"
        for path, values in found.items()
        for value in values
        if abs(value - stated[path]) > _ALIKE * stated[path]
    ]
    if wrong:
        more = f", and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        return failed(f"{'; '.join(wrong[:_NAMED])}{more}")
    values = ", ".join(f"{value:g}" for value in sorted({stated[path] for path in found}))
    return passed(f"{len(found)} norms add what the model's own add before they divide: {values}", norms=len(found))


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
        if tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
        and not tensor.external_data
        and list(tensor.dims) in ([], [1])
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
