"""Pass: replace a product whose result is only cut into parts by one product for each part.

Models keep the matrices of queries, keys and values in one, or those of a gate and of what it gates. The product of
such a matrix is cut along its columns, which copies all of it; to cut the matrix itself costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..graph_values import add_constant, node_like
from .matching import cut_of, integers, maker, only_user, static, users

# Narrower parts are not split: narrow products are slow, and are not quantized.
_NARROWEST = 32


class _Part(NamedTuple):
    """What is read of a product: columns `[start, end)`, as a value that they are reshaped to if `sizes` says so."""

    value: Any
    start: int
    end: int
    sizes: tuple[int, ...]


def apply(model: Any) -> None:
    """Cut the matrices of an `onnx_ir.Model`, in place."""
    for node in list(model.graph):
        if node.op_type == "MatMul" and node.domain == "" and _is_weight(node.inputs[1], 2):
            _cut(model.graph, node)


def _is_weight(value: Any, rank: int) -> bool:
    """Return whether a value is a constant with this number of axes and one user."""
    constant = value is not None and value.const_value is not None and value.is_initializer()
    return constant and not value.is_graph_input() and len(value.const_value.shape) == rank and len(value.uses()) == 1


def _cut(graph: Any, product: Any) -> None:
    result, bias = product.outputs[0], None
    added = only_user(result, "Add")
    if added is not None:
        bias = added.inputs[1 - list(added.inputs).index(result)]
        if not _is_weight(bias, 1):
            return
        result = added.outputs[0]
    reshaped = only_user(result, "Reshape")
    parts = _columns(result) if reshaped is None else _slots(result, reshaped.outputs[0])
    if len(parts) < 2 or min(part.end - part.start for part in parts) < _NARROWEST:
        return
    if any(a.end > b.start for a, b in pairwise(parts)):
        return
    for part in parts:
        _replace(graph, product, bias, part)


def _columns(result: Any) -> list[_Part]:
    """List the parts cut from the last axis, in order; none if the result is used in another way."""
    if result.shape is None or result.is_graph_output():
        return []
    found = []
    for value in _outputs(users(result)):
        cut = cut_of(value)
        if cut is None or cut.source is not result or cut.axis != len(result.shape) - 1:
            return []
        found.append(_Part(value, cut.start, cut.end, ()))
    return sorted(found, key=lambda part: part.start)


def _slots(result: Any, parted: Any) -> list[_Part]:
    """List the parts of a result `[B, N, P·T]` that is reshaped to `[B, N, P, T…]` and indexed along `P`."""
    if result.shape is None or parted.shape is None or parted.is_graph_output() or len(result.shape) != 3:
        return []
    sizes = list(parted.shape)[2:]
    columns = static(result, -1)
    if len(sizes) < 2 or list(parted.shape)[:2] != list(result.shape)[:2] or columns is None:
        return []
    if not all(isinstance(size, int) for size in sizes):
        return []
    width = columns // sizes[0]
    found = []
    for value in _outputs(users(parted)):
        cut, squeeze = cut_of(value), only_user(value, "Squeeze")
        if cut is None or cut.source is not parted or cut.axis != 2 or cut.end != cut.start + 1 or squeeze is None:
            return []
        if integers(squeeze.inputs[1] if len(squeeze.inputs) > 1 else None) not in ([2], [2 - len(parted.shape)]):
            return []
        found.append(_Part(squeeze.outputs[0], cut.start * width, cut.end * width, tuple(sizes[1:])))
    return sorted(found, key=lambda part: part.start)


def _outputs(nodes: Sequence[Any]) -> list[Any]:
    """List the used outputs of nodes, each once."""
    return list(dict.fromkeys(x for node in nodes for x in node.outputs if x.uses() or x.is_graph_output()))


def _replace(graph: Any, product: Any, bias: Any, part: _Part) -> None:
    """Compute one part by a separate product."""
    import numpy as np
    import onnx_ir as ir

    made: list[Any] = []
    result = product.outputs[0]

    def add(op_type: str, inputs: list[Any]) -> Any:
        shape = [*result.shape[:-1], part.end - part.start]
        made.append(node_like(product, op_type, inputs, shape, result.dtype))
        return made[-1].outputs[0]

    def columns(weight: Any) -> Any:
        content = weight.const_value.numpy()[..., part.start : part.end]
        return add_constant(graph, f"{weight.name}/{part.start}", np.ascontiguousarray(content))

    value = add("MatMul", [product.inputs[0], columns(product.inputs[1])])
    if bias is not None:
        value = add("Add", [value, columns(bias)])
    if part.sizes:
        shape = np.array([0, 0, *part.sizes])
        add("Reshape", [value, add_constant(graph, f"{product.inputs[1].name}/{part.start}/shape", shape)])
    ir.convenience.replace_nodes_and_values(
        graph, maker(part.value, "Slice", "Split", "Squeeze"), [], made, [part.value], [made[-1].outputs[0]]
    )
