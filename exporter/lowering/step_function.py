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


def _step(op: Any, *inputs: Any) -> Any:
    """Compute one token: write its key and value, then attend to the ring."""
    query, key, value, key_cache, value_cache, score_bias, write_index, *scales = inputs
    keys = op.ScatterND(key_cache, write_index, key)
    values = op.ScatterND(value_cache, write_index, value)
    return _attend(op, query, keys, values, score_bias, scales), keys, values


def _chunk(op: Any, *inputs: Any) -> Any:
    """Compute several tokens: attend to the old ring and the new keys, then write them."""
    query, key, value, key_cache, value_cache, score_bias, write_index, *scales = inputs
    keys, values = op.Concat(key_cache, key, axis=2), op.Concat(value_cache, value, axis=2)
    output = _attend(op, query, keys, values, score_bias, scales)
    return output, op.Gather(keys, write_index, axis=2), op.Gather(values, write_index, axis=2)


class _Grouped:
    """The bodies of an op type that shares heads of keys: queries of a group are rows of one product.

    Args:
        variant: the op type.
    """

    def __init__(self, variant: StepVariant) -> None:
        self.variant = variant

    def step(self, op: Any, *inputs: Any) -> Any:
        """Compute one token; the scores `[B, KV, G, R]` have a row for each head of a group."""
        query, key, value, key_cache, value_cache, score_bias, write_index, *sinks = inputs
        keys = op.ScatterND(key_cache, write_index, key)
        values = op.ScatterND(value_cache, write_index, value)
        rows = [op.Shape(key, start=1, end=2), integers(op, -1, 1)]
        return self._attend(op, query, keys, values, score_bias, sinks, rows), keys, values

    def chunk(self, op: Any, *inputs: Any) -> Any:
        """Compute several tokens; the scores `[B, KV, G·C, V]` are those of all heads, `[B, H, C, V]`."""
        query, key, value, key_cache, value_cache, score_bias, write_index, *sinks = inputs
        keys, values = op.Concat(key_cache, key, axis=2), op.Concat(value_cache, value, axis=2)
        output = self._attend(op, query, keys, values, score_bias, sinks, [integers(op, -1, 1, 1)])
        return output, op.Gather(keys, write_index, axis=2), op.Gather(values, write_index, axis=2)

    def _attend(self, op: Any, query: Any, keys: Any, values: Any, bias: Any, sinks: Sequence[Any], rows: Any) -> Any:
        """Compute the formula of `core.nodes.grouped`; sinks take the shape `rows` beside the scores."""
        precise, keys, values = (op.Cast(x, to=ir.DataType.FLOAT) for x in (query, keys, values))
        scale = attribute(op, "scale")
        if self.variant.has_softcap:
            cap = attribute(op, "softcap")
            scale = op.Div(scale, cap)
        grouped = op.Concat(op.Shape(keys, start=0, end=2), integers(op, -1), op.Shape(keys, start=3, end=4), axis=0)
        turned = op.Transpose(keys, perm=[0, 1, 3, 2])
        scores = op.MatMul(op.Reshape(op.Mul(precise, scale), grouped), turned)
        if self.variant.has_softcap:
            scores = op.Mul(op.Tanh(scores), cap)
        together = op.Shape(scores)
        if self.variant.chunked:
            scores = op.Reshape(scores, op.Concat(op.Shape(query, start=0, end=3), integers(op, -1), axis=0))
        scores = op.Add(scores, bias)
        weights = op.Softmax(scores, axis=-1)
        if sinks:
            shape = rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)
            sink = op.Reshape(op.Cast(sinks[0], to=ir.DataType.FLOAT), shape)
            weights = op.Mul(weights, share_beside_sinks(op, scores, weights, sink))
        if self.variant.chunked:
            weights = op.Reshape(weights, together)
        return op.CastLike(op.Reshape(op.MatMul(weights, values), op.Shape(query)), query)


def build_step(op_type: str, opset: int, nodes: Sequence[ir.Node] = ()) -> ir.Function:
    """Build the ONNX function of an op type of `core.step_node`, the same for all nodes; see `functions.Builder`."""
    variant = STEP_VARIANT_BY_OP_TYPE[op_type]
    if variant.grouped:
        body: Any = _Grouped(variant).chunk if variant.chunked else _Grouped(variant).step
    else:
        body = _chunk if variant.chunked else _step
    return define(body, variant.op_type, variant.input_names, variant.attribute_names, opset)
