"""Store a traced model's linear layers in 4 bits, as the operator of onnxruntime that multiplies by such matrices.

Each becomes `com.microsoft::MatMulNBits`. Its accuracy level of 4 lets the processor round activations to 8 bits, with
a scale for every 32 numbers of one token, where it multiplies 8-bit integers fast; that error is a sixteenth of the
weights' own (docs/numerics.md). No token has a say in the scales of another.

Embeddings, attention, norms, residual streams, and matrices too narrow to be worth it stay as they are.
`onnx_graph.standard_ops` writes the same in standard operators.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir

from ....core.errors import ExportFailed
from ....onnx_graph.block_weights import BITS, DOMAIN, OP_TYPE, packed
from ....onnx_graph.graph_values import add_constant
from .blocks import BLOCK, round_in_blocks
from .linear_layers import linear_layers, replace_layers

_log = logging.getLogger(__name__)

# Products of 8-bit integers, summed in 32 bits: 0.19 of fp32's time a token, where exact products take 0.52.
_ACCURACY = 4


def quantize(model: ir.Model) -> ir.Model:
    """Store the model's linear layers in 4 bits, in place, and return the model.

    Args:
        model: traced, fp32, with or without ONNX functions.

    Raises:
        ExportFailed: there is no linear layer, or a matrix holds NaN or infinity.
    """
    layers = linear_layers(model)
    _log.info("storing %d linear layers in 4 bits", len(layers))
    replace_layers(model, layers, lambda matrix, transposed: _stored(model, matrix, transposed=transposed), _replace)
    model.opset_imports[DOMAIN] = 1
    return model


def _stored(model: ir.Model, matrix: ir.Value, *, transposed: bool) -> list[ir.Value]:
    """Add the initializers of a matrix in blocks: levels, scales and zero points."""
    assert matrix.const_value is not None
    numbers = matrix.const_value.numpy().astype(np.float32, copy=False)
    if not np.isfinite(numbers).all():
        raise ExportFailed(
            f"{matrix.name} cannot be stored in 4 bits.", why="It holds NaN or infinity.", fix="Check the checkpoint."
        )
    blocks = round_in_blocks(numbers.T if transposed else numbers)
    name = f"{matrix.name}{'.turned' if transposed else ''}"
    # The scales in one dimension, as every release reads them.
    parts = {
        "levels": packed(blocks.levels), "scales": blocks.scales.reshape(-1), "zeros": packed(blocks.zeros).reshape(-1)
    }  # fmt: skip
    return [add_constant(model.graph, f"{name}.{part}", array) for part, array in parts.items()]


def _replace(node: ir.Node, stored: list[ir.Value], matrix: ir.Value, transposed: bool) -> None:
    """Put a product with a stored matrix in the place of a linear layer; its result keeps name, type and shape."""
    assert matrix.const_value is not None
    rows, columns = matrix.const_value.shape.numpy()[:: -1 if transposed else 1]
    attributes = {"K": rows, "N": columns, "bits": BITS, "block_size": BLOCK, "accuracy_level": _ACCURACY}
    made = ir.node(
        OP_TYPE,
        [node.inputs[0], *stored],
        attributes,
        domain=DOMAIN,
        name=node.name,
        metadata_props=dict(node.metadata_props),
    )
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], [made], node.outputs, made.outputs)
