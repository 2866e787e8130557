"""Find the linear layers of a traced model with large matrices, and replace them by ones with fewer bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ....core.errors import ExportFailed
from ....onnx_graph.graph_values import add_constant

_log = logging.getLogger(__name__)

# Narrower matrices (a gate per head, the weights of residual streams) take almost no time and are the most sensitive.
NARROWEST = 32


def linear_layers(model: ir.Model) -> list[ir.Node]:
    """List plain products with a constant matrix that is wide enough: `x·W`, or `x·Wᵀ` by Gemm.

    A head that reads the table of embeddings turned around gets a matrix of its own, in place.

    Raises:
        ExportFailed: there is no such layer.
    """
    _part_from_tables(model)
    found = []
    for node in model.graph:
        if node.domain or not (node.op_type == "MatMul" or is_plain_gemm(node)):
            continue
        matrix = node.inputs[1]
        if matrix is None or not matrix.is_initializer() or matrix.shape is None:
            continue
        sizes = [size for size in matrix.shape if isinstance(size, int)]
        if len(sizes) == 2 and min(sizes) >= NARROWEST:
            found.append(node)
    if not found:
        raise ExportFailed(
            "The model has no layer to quantize.", why=f"No constant matrix is {NARROWEST} wide or more."
        )
    return found


def _part_from_tables(model: ir.Model) -> None:
    """Replace `x·Transpose(W)` by a product with the transposed matrix as a constant."""
    for node in list(model.graph):
        matrix = node.inputs[1] if node.op_type == "MatMul" and not node.domain else None
        turning = matrix.producer() if matrix is not None else None
        if turning is None or turning.op_type != "Transpose" or turning.domain:
            continue
        table = turning.inputs[0]
        if table is None or not table.is_initializer() or table.const_value is None:
            continue
        numbers = table.const_value.numpy()
        if numbers.ndim == 2 and min(numbers.shape) >= NARROWEST:
            turned = add_constant(model.graph, f"{table.name}.head", np.ascontiguousarray(numbers.T))
            turning.outputs[0].replace_all_uses_with(turned)
            model.graph.remove(turning, safe=True)


@dataclass(frozen=True)
class StoredMatrix:
    """The description of a matrix `[K, N]`.

    Args:
        initializers: of the model, as the products read them.
        rows: K.
        columns: N.
    """

    initializers: list[ir.Value]
    rows: int
    columns: int


def replace_layers(
    model: ir.Model,
    kind: str,
    store: Callable[[str, NDArray[Any]], list[ir.Value]],
    replace: Callable[[ir.Node, StoredMatrix], None],
) -> None:
    """Replace a model's linear layers, in place; a matrix that several share is stored once.

    A matrix that is no longer read is removed.

    Args:
        model: traced.
        kind: what a matrix is stored in, for errors.
        store: adds to the model what is kept of a matrix `[K, N]`, under names that begin with this one.
        replace: puts other nodes in the place of a layer, whose matrix was stored.

    Raises:
        ExportFailed: there is no linear layer, or a matrix contains NaN or infinity.
    """
    layers = linear_layers(model)
    _log.info("storing %d linear layers in %s", len(layers), kind)
    stored: dict[str, StoredMatrix] = {}
    for node in layers:
        matrix = node.inputs[1]
        assert matrix is not None and matrix.const_value is not None
        name = f"{matrix.name}{'.turned' if is_transposed(node) else ''}"
        if name not in stored:
            numbers = matrix.const_value.numpy()
            numbers = numbers.T if is_transposed(node) else numbers
            if not np.isfinite(numbers).all():
                raise ExportFailed(
                    f"{matrix.name} cannot be stored in {kind}.",
                    why="It holds NaN or infinity.",
                    fix="Check the checkpoint.",
                )
            stored[name] = StoredMatrix(store(name, numbers), *numbers.shape)
        replace(node, stored[name])
        if not matrix.uses():
            model.graph.initializers.pop(matrix.name or "")


def is_transposed(node: ir.Node) -> bool:
    """Return whether a linear layer multiplies by the transposed matrix."""
    return "transB" in node.attributes and bool(node.attributes["transB"].as_int())


def is_plain_gemm(node: ir.Node) -> bool:
    """Return whether a Gemm is `x·W` or `x·Wᵀ`."""
    factors = {name: node.attributes[name].value for name in ("alpha", "transA") if name in node.attributes}
    plain = factors.get("alpha", 1.0) == 1.0 and not factors.get("transA", 0)
    return node.op_type == "Gemm" and plain and all(value is None for value in node.inputs[2:])
