"""The WindowedAttention node written in standard ONNX operators: the function that rides in the file.

Any runtime that knows neither the node nor a plugin for it inlines this body. It is driven by the
node's attributes and by the shapes of its inputs alone, so that one body serves every geometry and
length, and runtimes fold its index arithmetic away once shapes are known.

The sequence is cut into blocks of `query_block` queries. Block `i` starts at `i·block`; every key any of
its queries can see lies in the `keys = (b + f)·w + block` positions from `i·block - b·w` on, for
block-local windows too, since there the block is the window. One Gather lays these spans side by
side; two additive biases hide what a query must not see: `[block, keys]` for the window, the same for all blocks,
and `[blocks, 1, keys]` for positions outside the sequence and masked keys.

It computes in fp32 whatever the inputs' dtype, as the kernels do with their scores: rounding scores to
fp16 was the largest error of an fp16 file, and on the CPU fp16 is slower, not faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
from onnxscript import build_function

from ..core.node import DOMAIN, LOWEST_BIAS, SELF_SCORE, NodeVariant

# A key hidden by the key mask keeps a higher score than one outside the window: a row all of whose
# visible keys are masked then spreads over those keys alone, whose values are zero. Finite, so that
# no row becomes NaN.
MASKED_SCORE = -1e30
OUTSIDE_SCORE = -2e30

ATTRIBUTE_TYPES: Mapping[str, ir.AttributeType] = {
    "window_size": ir.AttributeType.INT,
    "look_backward": ir.AttributeType.INT,
    "look_forward": ir.AttributeType.INT,
    "causal": ir.AttributeType.INT,
    "exact_windowsize": ir.AttributeType.INT,
    "scale": ir.AttributeType.FLOAT,
    "shared_qk": ir.AttributeType.INT,
    "perm": ir.AttributeType.INTS,
    "query_block": ir.AttributeType.INT,
    "xpos_scale_base": ir.AttributeType.FLOAT,
    "plugin_namespace": ir.AttributeType.STRING,
    "plugin_version": ir.AttributeType.STRING,
}


def _attribute(op: Any, name: str) -> Any:
    """The value of one of the node's numeric attributes as a scalar tensor."""
    kind = ATTRIBUTE_TYPES[name]
    field = "value_int" if kind == ir.AttributeType.INT else "value_float"
    return op.Constant(**{field: ir.RefAttr(field, name, kind)})


def _integers(op: Any, *values: int) -> Any:
    """An int64 vector."""
    return op.Constant(value_ints=list(values))


def _real(op: Any, value: float) -> Any:
    """An fp32 scalar."""
    return op.Constant(value_float=value)


class _Span:
    """The integers a block is made of, as scalar int64 tensors of the graph."""

    def __init__(self, op: Any, length: Any) -> None:
        self.zero, self.one = op.Constant(value_int=0), op.Constant(value_int=1)
        self.length = length
        self.window = _attribute(op, "window_size")
        self.block = _attribute(op, "query_block")
        self.backward = op.Mul(_attribute(op, "look_backward"), self.window)
        self.forward = op.Mul(_attribute(op, "look_forward"), self.window)
        self.keys = op.Add(op.Add(self.backward, self.forward), self.block)
        self.blocks = op.Div(op.Sub(op.Add(length, self.block), self.one), self.block)
        # Positions relative to the block's first query: [block, 1] and [1, keys].
        self.query_offset = op.Unsqueeze(self.range(op, self.block), _integers(op, 1))
        self.key_offset = op.Unsqueeze(op.Sub(self.range(op, self.keys), self.backward), _integers(op, 0))
        # Where each block starts: [blocks, 1].
        self.block_start = op.Unsqueeze(op.Mul(self.range(op, self.blocks), self.block), _integers(op, 1))

    def range(self, op: Any, end: Any) -> Any:
        """`0, 1, … end - 1`."""
        return op.Range(self.zero, end, self.one)


def _window_bias(op: Any, span: _Span) -> Any:
    """`[block, keys]` fp32: 0 where a query sees the key, by the interval of `core.geometry`."""
    causal, exact = _attribute(op, "causal"), _attribute(op, "exact_windowsize")
    query, key = span.query_offset, span.key_offset
    first = op.Sub(op.Mul(exact, query), span.backward)
    window_end = op.Sub(op.Add(span.window, span.forward), span.one)
    exact_end = op.Add(query, span.forward)
    last = op.Where(op.Cast(exact, to=ir.DataType.BOOL), exact_end, window_end)
    last = op.Where(op.Cast(causal, to=ir.DataType.BOOL), query, last)
    visible = op.And(op.GreaterOrEqual(key, first), op.LessOrEqual(key, last))
    self_score = op.Mul(op.Cast(_attribute(op, "shared_qk"), to=ir.DataType.FLOAT), _real(op, SELF_SCORE))
    seen = op.Where(op.Equal(key, query), self_score, _real(op, 0.0))
    return op.Where(visible, seen, _real(op, OUTSIDE_SCORE))


def _given_bias(op: Any, span: _Span, bias: Any) -> Any:
    """The additive bias as fp32 `[H, block, keys]`; a token's score with itself takes none under shared_qk."""
    shared = op.Cast(_attribute(op, "shared_qk"), to=ir.DataType.BOOL)
    itself = op.And(op.Equal(span.key_offset, span.query_offset), shared)
    bias = op.Max(op.Cast(bias, to=ir.DataType.FLOAT), _real(op, LOWEST_BIAS))
    return op.Where(itself, _real(op, 0.0), bias)


def _sequence_bias(op: Any, span: _Span, position: Any, index: Any, key_mask: Any | None) -> Any:
    """fp32 `[blocks, 1, keys]`, or `[B, 1, blocks, 1, keys]` with a key mask: hides what is no key."""
    inside = op.And(op.GreaterOrEqual(position, span.zero), op.Less(position, span.length))
    edge = op.Where(inside, _real(op, 0.0), _real(op, OUTSIDE_SCORE))
    if key_mask is None:
        return op.Unsqueeze(edge, _integers(op, 1))
    kept = op.Gather(key_mask, index, axis=1)  # [B, blocks, keys]
    kept = op.Where(kept, _real(op, 0.0), _real(op, MASKED_SCORE))
    return op.Unsqueeze(op.Add(kept, edge), _integers(op, 1, 3))


def _xpos_scale(op: Any, span: _Span, head_dim: Any, offset: Any, sign: float) -> Any:
    """`ζ^(±(offset - centre) / base)`, `[len(offset), D]` fp32; local to the block, so it cannot overflow."""
    dim = op.Cast(head_dim, to=ir.DataType.FLOAT)
    half = op.Div(head_dim, op.Add(span.one, span.one))
    channel = op.Cast(span.range(op, half), to=ir.DataType.FLOAT)
    twice = op.Add(channel, channel)
    zeta = op.Div(op.Add(twice, op.Mul(dim, _real(op, 0.4))), op.Mul(dim, _real(op, 1.4)))
    zeta = op.Unsqueeze(op.Concat(zeta, zeta, axis=0), _integers(op, 0))
    centre = op.Cast(op.Sub(op.Add(span.block, span.forward), span.backward), to=ir.DataType.FLOAT)
    centre = op.Mul(centre, _real(op, 0.5))
    distance = op.Mul(op.Sub(op.Cast(offset, to=ir.DataType.FLOAT), centre), _real(op, sign))
    return op.Pow(zeta, op.Div(distance, _attribute(op, "xpos_scale_base")))


def _body(variant: NodeVariant, *, aligned: bool) -> Any:
    """The function that traces the body of one op type."""

    def trace(op: Any, query: Any, key: Any, value: Any, *optional: Any) -> Any:
        extra = dict(zip(variant.input_names[3:], optional, strict=True))
        perm = ir.RefAttr("perm", "perm", ir.AttributeType.INTS)
        given = query
        query, key, value = (
            op.Cast(op.Transpose(x, perm=perm), to=ir.DataType.FLOAT) for x in (query, key, value)
        )  # [B, H, N, D]
        length = op.Squeeze(op.Shape(query, start=2, end=3), _integers(op, 0))
        head_dim = op.Shape(query, start=3, end=4)
        span = _Span(op, length)

        position = op.Add(span.block_start, span.key_offset)  # [blocks, keys]
        last = op.Sub(length, span.one)
        index = op.Max(op.Min(position, last), span.zero)
        if not aligned:  # the last block repeats the last query; its extra rows are cut off below
            rows = span.range(op, op.Mul(span.blocks, span.block))
            query = op.Gather(query, op.Min(rows, last), axis=2)
        same, rest = _integers(op, 0, 0), _integers(op, -1)
        block_shape = op.Concat(same, rest, op.Unsqueeze(span.block, _integers(op, 0)), head_dim, axis=0)
        query = op.Reshape(query, block_shape)  # [B, H, blocks, block, D]
        mask = extra.get("key_mask")
        if mask is not None:
            value = op.Mul(value, op.Cast(op.Unsqueeze(mask, _integers(op, 1, 3)), to=ir.DataType.FLOAT))
        key = op.Gather(key, index, axis=2)  # [B, H, blocks, keys, D]
        value = op.Gather(value, index, axis=2)

        if variant.has_xpos:
            scalar_dim = op.Squeeze(head_dim, _integers(op, 0))
            ahead = op.Add(span.query_offset, span.forward)
            query_scale = _xpos_scale(op, span, scalar_dim, ahead, 1.0)
            key_scale = _xpos_scale(op, span, scalar_dim, op.Transpose(span.key_offset, perm=[1, 0]), -1.0)
            query = op.Mul(query, query_scale)
            key = op.Mul(key, key_scale)

        query = op.Mul(query, _attribute(op, "scale"))
        scores = op.MatMul(query, op.Transpose(key, perm=[0, 1, 2, 4, 3]))
        bias = _window_bias(op, span)
        if variant.has_bias:
            bias = op.Add(op.Unsqueeze(_given_bias(op, span, extra["attn_bias"]), _integers(op, 1)), bias)
        scores = op.Add(scores, bias)
        scores = op.Add(scores, _sequence_bias(op, span, position, index, mask))
        output = op.MatMul(op.Softmax(scores, axis=-1), value)
        output = op.Reshape(output, op.Concat(same, rest, head_dim, axis=0))
        if not aligned:
            end = op.Unsqueeze(length, _integers(op, 0))
            output = op.Slice(output, _integers(op, 0), end, _integers(op, 2))
        return op.Transpose(op.CastLike(output, given), perm=perm)

    return trace


def function_body(variant: NodeVariant, opset: int, *, aligned: bool = False) -> ir.Function:
    """The model-local function of one op type.

    Args:
        variant: the op type.
        opset: opset of the body; it must be the model's.
        aligned: every length the file runs at is a multiple of `query_block`, so nothing is padded.
    """
    inputs = [ir.Value(name=name) for name in variant.input_names]
    attributes = [ir.Attr(name, kind, None) for name, kind in ATTRIBUTE_TYPES.items()]
    return build_function(
        _body(variant, aligned=aligned),
        inputs,
        domain=DOMAIN,
        name=variant.op_type,
        attributes=attributes,
        opset_imports={"": opset},
    )
