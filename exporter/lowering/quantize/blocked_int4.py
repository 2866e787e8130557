"""Store a traced model's linear layers in 4 bits, as the operator of onnxruntime that multiplies by such matrices.

Each becomes `com.microsoft::MatMulNBits`. Its accuracy level of 4 lets the processor round activations to 8 bits, with
a scale for every 32 numbers of one token, where it multiplies 8-bit integers fast; that error is a sixteenth of the
weights' own (docs/numerics.md). No token has a say in the scales of another.

Embeddings, attention, norms, residual streams, and matrices too narrow to be worth it stay as they are.
`onnx_graph.standard_ops` writes the same in standard operators.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ....onnx_graph.block_weights import BITS, DOMAIN, OP_TYPE, packed
from ....onnx_graph.graph_values import add_constant, replace_node
from .blocks import BLOCK, round_in_blocks
from .linear_layers import StoredMatrix, replace_layers

# Products of 8-bit integers, summed in 32 bits: 0.19 of fp32's time a token, where exact products take 0.52.
_ACCURACY = 4


def quantize(model: ir.Model) -> ir.Model:
    """Store the model's linear layers in 4 bits, in place, and return the model.

    Args:
        model: traced, fp32, with or without ONNX functions.

    Raises:
        ExportFailed: there is no linear layer, or a matrix holds NaN or infinity.
    """
    replace_layers(model, "4 bits", partial(_stored, model), _replace)
    return model


def _stored(model: ir.Model, name: str, matrix: NDArray[Any]) -> list[ir.Value]:
    """Add the initializers of a matrix in blocks: levels, scales and zero points."""
    blocks = round_in_blocks(matrix.astype(np.float32, copy=False))
    # The scales in one dimension, as every release reads them.
    parts = {
        "levels": packed(blocks.levels), "scales": blocks.scales.reshape(-1), "zeros": packed(blocks.zeros).reshape(-1)
    }  # fmt: skip
    return [add_constant(model.graph, f"{name}.{part}", array) for part, array in parts.items()]


def _replace(node: ir.Node, matrix: StoredMatrix) -> None:
    """Put a product with a stored matrix in the place of a linear layer."""
    replace_node(
        node,
        OP_TYPE,
        [node.inputs[0], *matrix.initializers],
        domain=DOMAIN,
        name=node.name,
        K=matrix.rows,
        N=matrix.columns,
        bits=BITS,
        block_size=BLOCK,
        accuracy_level=_ACCURACY,
    )
