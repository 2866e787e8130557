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
from .grouped_function import share_left_by_sinks


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
    op: Any,
    variant: StepVariant,
    query: Any,
    keys: Any,
    values: Any,
    score_bias: Any,
    sinks: Sequence[Any],
    sink_sizes: Sequence[Any],
) -> Any:
    """Compute the formula of `core.nodes.grouped`; queries of a group are rows of one product.

    The scores of a step, `[B, KV, G, R]`, have a row for each head of a group; those of a chunk, `[B, KV, G·C, V]`,
    are those of all heads, `[B, H, C, V]`.

    Args:
        op: the builder.
        variant: the op type.
        query: queries `[B, H, C, D]`.
        keys: all keys attended to, `[B, KV, V, D]`.
        values: their values.
        score_bias: added to the scores.
        sinks: the input `[H]`, or nothing.
        sink_sizes: vectors that make up the shape in which sinks are broadcast against the scores.
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
    scores = op.Add(scores, score_bias)
    weights = op.Softmax(scores, axis=-1)
    if sinks:
        shape = sink_sizes[0] if len(sink_sizes) == 1 else op.Concat(*sink_sizes, axis=0)
        sink = op.Reshape(op.Cast(sinks[0], to=ir.DataType.FLOAT), shape)
        weights = op.Mul(weights, share_left_by_sinks(op, scores, weights, sink))
    if variant.chunked:
        weights = op.Reshape(weights, together)
    return op.CastLike(op.Reshape(op.MatMul(weights, values), op.Shape(query)), query)


def _body(variant: StepVariant) -> Any:
    """Return the Python function that traces the ONNX function of one op type."""

    def trace(op: Any, query: Any, key: Any, value: Any, *others: Any) -> Any:
        key_cache, value_cache, score_bias, write_index, *extra = others  # extra: factors of xpos, or sinks
        if variant.chunked:  # attend to the old ring and the new keys, then write them
            keys = op.Concat(key_cache, key, axis=2)
            values = op.Concat(value_cache, value, axis=2)
        else:  # write the key and the value, then attend to the ring
            keys = op.ScatterND(key_cache, write_index, key)
            values = op.ScatterND(value_cache, write_index, value)
        if not variant.grouped:
            output = _attend(op, query, keys, values, score_bias, extra)
        else:
            if variant.chunked:
                sink_sizes = [integers(op, -1, 1, 1)]  # [H, 1, 1]
            else:
                sink_sizes = [op.Shape(key, start=1, end=2), integers(op, -1, 1)]  # [KV, G, 1]
            output = _attend_in_groups(op, variant, query, keys, values, score_bias, extra, sink_sizes)
        if variant.chunked:
            keys = op.Gather(keys, write_index, axis=2)
            values = op.Gather(values, write_index, axis=2)
        return output, keys, values

    return trace


def build_step(op_type: str, opset: int, nodes: Sequence[ir.Node] = ()) -> ir.Function:
    """Build the ONNX function of an op type of `core.nodes.step`, the same for all nodes; see `functions.Builder`."""
    variant = STEP_VARIANT_BY_OP_TYPE[op_type]
    return define(_body(variant), variant.op_type, variant.input_names, variant.attribute_names, opset)
