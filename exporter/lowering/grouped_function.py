"""Build the ONNX functions of the grouped nodes (`core.nodes.grouped`): their definition in standard operators.

Heads are grouped by a reshape to `[B, KV, G, …]`, with one dimension of size 1 for keys and values, over which products
broadcast: nothing is repeated in memory.

`GroupedWindowedAttention` lays blocks and spans of keys out as `WindowedAttention` does (`attention_function.py`).

`GlobalAttention` has no span to gather. A Scan over blocks of queries attends to all keys, so that one block's scores
are in memory at a time: linear in the length, whatever the length is.

A cap needs one pass more over the scores, sinks two that only read. With the softmax `p` of the scores `x` alone, the
sum of `e^x` is `e^max(x) / max(p)`, so the output with a sink is `σ(max(x) - log max(p) - sink)·p·v`: no column is
added to the scores, and nothing overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ...core.nodes.grouped import GROUPED_BY_OP_TYPE, GroupedVariant
from .attention_function import (
    HIDDEN_SCORE,
    Span,
    cut,
    heads_first,
    lay_out,
    mask_bias,
    shared_properties,
    softmax,
    without_masked,
)
from .function_parts import attribute, define, integers, real
from .function_properties import FunctionProperties

# The axis of the blocks in queries [B, KV, G, blocks, block, D].
_BLOCKS = 3


class _Sizes:
    """Sizes of a node's inputs as tensors of the graph, and the common properties of all nodes."""

    def __init__(self, op: Any, query: Any, key: Any, properties: FunctionProperties) -> None:
        self.properties = properties
        self.length = op.Squeeze(op.Shape(query, start=2, end=3), integers(op, 0))
        self.heads, self.kv_heads = op.Shape(query, start=1, end=2), op.Shape(key, start=1, end=2)
        self.groups = op.Div(self.heads, self.kv_heads)
        self.head_dim = op.Shape(query, start=3, end=4)


class _Scores:
    """How a variant makes weights of products: its scale, cap and sinks.

    Args:
        op: the builder of the function's own graph; its values here are used in subgraphs too.
        variant: the op type.
        sizes: those of the inputs.
        sinks: the input, or None.
    """

    def __init__(self, op: Any, variant: GroupedVariant, sizes: _Sizes, sinks: Any | None) -> None:
        self.scale, self.cap, self.sinks = attribute(op, "scale"), None, None
        if variant.has_softcap:
            self.cap = attribute(op, "softcap")
            self.scale = op.Div(self.scale, self.cap)
        if sinks is not None:
            shape = op.Concat(sizes.kv_heads, sizes.groups, integers(op, 1, 1), axis=0)
            self.sinks = op.Reshape(op.Cast(sinks, to=ir.DataType.FLOAT), shape)

    def attend(self, op: Any, query: Any, turned: Any, value: Any, biases: Sequence[Any], sinks: Any | None) -> Any:
        """Compute the outputs of some queries.

        Args:
            op: the builder.
            query: queries times `scale`, `[…, queries, D]`.
            turned: keys, `[…, D, keys]`.
            value: values, `[…, keys, D]`.
            biases: added to the scores.
            sinks: broadcast against `[…, queries, 1]`, or None.
        """
        scores = op.MatMul(query, turned)
        if self.cap is not None:
            scores = op.Mul(op.Tanh(scores), self.cap)
        for bias in biases:
            scores = op.Add(scores, bias)
        weights = softmax(op, scores)
        output = op.MatMul(weights, value)
        return output if sinks is None else op.Mul(output, share_left_by_sinks(op, scores, weights, sinks))


def share_left_by_sinks(op: Any, scores: Any, weights: Any, sinks: Any) -> Any:
    """Compute the share that sinks leave to the keys, `[…, queries, 1]`, as this file's docstring derives it.

    Args:
        op: the builder.
        scores: `[…, queries, keys]`.
        weights: their softmax.
        sinks: broadcast against the result.
    """
    last = integers(op, -1)
    top, most = (op.ReduceMax(x, last, keepdims=1) for x in (scores, weights))
    return op.Sigmoid(op.Sub(op.Sub(top, op.Log(most)), sinks))


def _body(variant: GroupedVariant, properties: FunctionProperties) -> Any:
    """Return the Python function that traces the ONNX function of one op type."""

    def trace(op: Any, query: Any, key: Any, value: Any, *optional: Any) -> Any:
        extra = dict(zip(variant.input_names[3:], optional, strict=True))
        given, mask = query, extra.get("key_mask")
        query, key, value = (op.Cast(heads_first(op, x, properties), to=ir.DataType.FLOAT) for x in (query, key, value))
        sizes = _Sizes(op, query, key, properties)
        scores = _Scores(op, variant, sizes, extra.get("sinks"))
        attend = _attend_to_all if variant.sees_all else _attend_to_windows
        output = attend(op, sizes, scores, query, key, value, mask)
        rows = op.Concat(integers(op, 0), sizes.heads, integers(op, -1), sizes.head_dim, axis=0)
        output = op.Reshape(op.CastLike(output, given), rows)
        if not properties.aligned:
            end = op.Unsqueeze(sizes.length, integers(op, 0))
            output = op.Slice(output, integers(op, 0), end, integers(op, 2))
        return heads_first(op, output, properties)

    return trace


def _in_blocks(op: Any, sizes: _Sizes, query: Any, block: Any, rows: Any) -> Any:
    """Reshape queries to `[B, KV, G, blocks, block, D]`; a short last block repeats the last query."""
    if not sizes.properties.aligned:
        query = op.Gather(query, op.Min(rows, op.Sub(sizes.length, op.Constant(value_int=1))), axis=2)
    block = op.Unsqueeze(block, integers(op, 0))
    shape = op.Concat(integers(op, 0), sizes.kv_heads, sizes.groups, integers(op, -1), block, sizes.head_dim, axis=0)
    return op.Reshape(query, shape)


def _attend_to_windows(op: Any, sizes: _Sizes, scores: _Scores, query: Any, key: Any, value: Any, mask: Any) -> Any:
    """Attend to the spans of blocks; `[B, KV, G, blocks, block, D]`."""
    properties, span = sizes.properties, Span(op, sizes.length, grouped=True)
    rows = None if properties.aligned else span.range(op, op.Mul(span.blocks, span.block))
    query = op.Mul(_in_blocks(op, sizes, query, span.block, rows), scores.scale)
    laid_out = lay_out(op, span, key, value, mask, properties)
    group = integers(op, 2)
    sinks = None if scores.sinks is None else op.Unsqueeze(scores.sinks, group)
    outputs = []
    for part, *where in cut(op, span, query, properties.parts, _BLOCKS):
        keys, values, biases = laid_out.part(op, *where)
        if mask is not None:  # a bias that differs between batch entries has five dimensions
            biases = [op.Unsqueeze(bias, group) for bias in biases]
        turned = op.Transpose(op.Unsqueeze(keys, group), perm=[0, 1, 2, 3, 5, 4])
        outputs.append(scores.attend(op, part, turned, op.Unsqueeze(values, group), biases, sinks))
    return outputs[0] if len(outputs) == 1 else op.Concat(*outputs, axis=_BLOCKS)


def _attend_to_all(op: Any, sizes: _Sizes, scores: _Scores, query: Any, key: Any, value: Any, mask: Any) -> Any:
    """Attend to all keys, one block of queries after the other; `[B, KV, G, blocks, block, D]`."""
    zero, one, first = op.Constant(value_int=0), op.Constant(value_int=1), integers(op, 0)
    if mask is not None:
        key, value = without_masked(op, mask, key, value)
    block = op.Max(op.Min(attribute(op, "query_block"), sizes.length), one)
    blocks = op.Div(op.Sub(op.Add(sizes.length, block), one), block)
    rows = op.Range(zero, op.Mul(blocks, block), one)
    query = op.Mul(_in_blocks(op, sizes, query, block, rows), scores.scale)
    offset = op.Unsqueeze(op.Range(zero, block, one), integers(op, 1))  # [block, 1]
    # Without a causal mask every row is as good as one behind the last.
    causal = op.Cast(attribute(op, "causal"), to=ir.DataType.BOOL)
    position = op.Unsqueeze(op.Range(zero, sizes.length, one), first)  # [1, N]
    group = integers(op, 2)
    turned = op.Transpose(op.Unsqueeze(key, group), perm=[0, 1, 2, 4, 3])
    value = op.Unsqueeze(value, group)
    masked = None if mask is None else mask_bias(op, op.Gather(mask, position, axis=1))  # [B, 1, 1, 1, N]
    # 32 bits hold any position; runtimes that compute int64 in as many need no proof that a state stays within them.
    narrow = [op.Cast(x, to=ir.DataType.INT32) for x in (op.Where(causal, zero, sizes.length), block, offset, position)]
    start, step, offset, position = narrow
    seen, unseen = real(op, 0.0), real(op, HIDDEN_SCORE)

    def attend(inner: Any, start: Any, part: Any) -> Any:
        bias = inner.Where(inner.LessOrEqual(position, inner.Add(start, offset)), seen, unseen)  # [block, N]
        bias = bias if masked is None else inner.Add(masked, bias)
        return inner.Add(start, step), scores.attend(inner, part, turned, value, [bias], scores.sinks)

    op.builder.push_module("block")  # for names of their own
    values = [ir.Value(name=f"block.{name}") for name in ("start", "query", "next", "output")]
    for given, element in zip(values, (ir.DataType.INT32, ir.DataType.FLOAT) * 2, strict=True):
        given.type = ir.TensorType(element)
    body = op.builder.subgraph(attend, values[:2], values[2:], name="block")
    op.builder.pop_module()
    # TensorRT needs a Scan with a state, and other engines need it along the first axis.
    query = op.Transpose(query, perm=[3, 0, 1, 2, 4, 5])
    _, parts = op.Scan(start, query, body=body, num_scan_inputs=1, _outputs=2)
    return op.Transpose(parts, perm=[1, 2, 3, 0, 4, 5])


def build_grouped(op_type: str, opset: int, nodes: Sequence[ir.Node]) -> ir.Function:
    """Build the ONNX function for all nodes of an op type of `core.nodes.grouped`; see `functions.Builder`."""
    variant = GROUPED_BY_OP_TYPE[op_type]
    return grouped_function(variant, opset, shared_properties(variant, nodes))


def grouped_function(variant: GroupedVariant, opset: int, properties: FunctionProperties | None = None) -> ir.Function:
    """Build the model-local ONNX function of one op type; the arguments are those of `attention_function`."""
    body = _body(variant, properties or FunctionProperties())
    function = define(body, variant.op_type, variant.input_names, variant.attribute_names, opset)
    for node in function.all_nodes():
        node.metadata_props.clear()  # the builder notes that it could not infer a Scan's shapes
    return function
