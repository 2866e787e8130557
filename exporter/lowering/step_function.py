"""Build the ONNX functions of the step nodes: their definition in standard operators, stored in a step file.

Everything is computed in fp32 whatever the inputs' dtype, as in the function of the whole-sequence node; the caches
keep the file's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ...core.nodes.step import STEP_VARIANT_BY_OP_TYPE, StepVariant
from .function_parts import attribute, define, integers
from .grouped_function import share_beside_sinks


def _attend(op: Any, query: Any, keys: Any, values: Any, score_bias: Any, scales: Sequence[Any]) -> Any:
    """Compute `softmax(scale·q·kᵀ + score_bias)·v`, in the dtype of the query."""
    precise, keys, values = (op.Cast(x, to=ir.DataType.FLOAT) for x in (query, keys, values))
    if scales:
        keys = op.Mul(keys, scales[-1])
    if len(scales) > 1:
        precise = op.Mul(precise, scales[0])
    scores = op.MatMul(op.Mul(precise, attribute(op, "scale")), op.Transpose(keys, perm=[0, 1, 3, 2]))
    weights = op.Softmax(op.Add(scores, score_bias), axis=-1)
    return op.CastLike(op.MatMul(weights, values), query)


def _attend_in_groups(
    op: Any, variant: StepVariant, query: Any, keys: Any, values: Any, bias: Any, sinks: Sequence[Any], rows: Any
) -> Any:
    """Compute the formula of `core.nodes.grouped`; queries of a group are rows of one product.

    The scores of a step, `[B, KV, G, R]`, have a row for each head of a group; those of a chunk, `[B, KV, G·C, V]`,
    are those of all heads, `[B, H, C, V]`. Sinks take the shape `rows` beside them.
    """
    precise, keys, values = (op.Cast(x, to=ir.DataType.FLOAT) for x in (query, keys, values))
    scale = attribute(op, "scale")
    if variant.has_softcap:
        cap = attribute(op, "softcap")
        scale = op.Div(scale, cap)
    grouped = op.Concat(op.Shape(keys, start=0, end=2), integers(op, -1), op.Shape(keys, start=3, end=4), axis=0)
    turned = op.Transpose(keys, perm=[0, 1, 3, 2])
    scores = op.MatMul(op.Reshape(op.Mul(precise, scale), grouped), turned)
    if variant.has_softcap:
        scores = op.Mul(op.Tanh(scores), cap)
    together = op.Shape(scores)
    if variant.chunked:
        scores = op.Reshape(scores, op.Concat(op.Shape(query, start=0, end=3), integers(op, -1), axis=0))
    scores = op.Add(scores, bias)
    weights = op.Softmax(scores, axis=-1)
    if sinks:
        shape = rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)
        sink = op.Reshape(op.Cast(sinks[0], to=ir.DataType.FLOAT), shape)
        weights = op.Mul(weights, share_beside_sinks(op, scores, weights, sink))
    if variant.chunked:
        weights = op.Reshape(weights, together)
    return op.CastLike(op.Reshape(op.MatMul(weights, values), op.Shape(query)), query)


def _body(variant: StepVariant) -> Any:
    """Return the Python function that traces the ONNX function of one op type."""

    def trace(
        op: Any, query: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, bias: Any, index: Any, *extra: Any
    ) -> Any:
        pairs = ((key_cache, key), (value_cache, value))
        if variant.chunked:  # attend to the old ring and the new keys, then write them
            keys, values = (op.Concat(*pair, axis=2) for pair in pairs)
        else:  # write the key and the value, then attend to the ring
            keys, values = (op.ScatterND(cache, index, written) for cache, written in pairs)
        if variant.grouped:
            rows = [integers(op, -1, 1, 1)] if variant.chunked else [op.Shape(key, start=1, end=2), integers(op, -1, 1)]
            output = _attend_in_groups(op, variant, query, keys, values, bias, extra, rows)
        else:
            output = _attend(op, query, keys, values, bias, extra)
        if variant.chunked:
            keys, values = (op.Gather(x, index, axis=2) for x in (keys, values))
        return output, keys, values

    return trace


def build_step(op_type: str, opset: int, nodes: Sequence[ir.Node] = ()) -> ir.Function:
    """Build the ONNX function of an op type of `core.nodes.step`, the same for all nodes; see `functions.Builder`."""
    variant = STEP_VARIANT_BY_OP_TYPE[op_type]
    return define(_body(variant), variant.op_type, variant.input_names, variant.attribute_names, opset)
