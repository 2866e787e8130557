"""Fix the sizes of a file with dynamic axes: modules are compared at one size."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from typing import Any

import onnx

from ...core.tensors import BATCH, SEQUENCE
from ..source.source_model import SourceModel

_OPERATORS: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def chosen_sizes(source: SourceModel, longest: int) -> dict[str, int]:
    """Return a batch of one, and a length at which a lost window shows: over two windows, if the file takes it.

    Args:
        source: the model.
        longest: the longest sequence that the file takes.
    """
    spans = [window.keys_per_window for window in source.windows if not window.sees_all] or [source.window_size]
    return {BATCH: 1, SEQUENCE: min(longest, 2 * max(spans) + 3)}


def fix(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> None:
    """Write numbers in place of names, and of sums and products of names, in the types of all values of a graph.

    What cannot be computed stays as it is; such a value is no boundary.
    """
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            size = _number(dimension.dim_param, sizes) if dimension.dim_param else None
            if size is not None:
                dimension.dim_value = size


def _number(text: str, sizes: Mapping[str, int]) -> int | None:
    """Compute an expression such as `2*batch*seq`; None if it is no such expression."""
    try:
        return _value(ast.parse(text, mode="eval").body, sizes)
    except (SyntaxError, KeyError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    """Compute a part of it; KeyError for what is neither a name, a number nor an operation of `_OPERATORS`."""
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, sizes)
    if isinstance(node, ast.BinOp):
        found: int = _OPERATORS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
        return found
    raise KeyError(ast.dump(node))
