"""Build the ONNX function of the WindowedAttention node: its definition in standard operators, stored in the file.

Any runtime without a plugin or a kernel for the node inlines this function. It depends only on the node's attributes
and the shapes of its inputs, so that one function serves every geometry and length, and runtimes fold its index
arithmetic once shapes are known.

The sequence is cut into blocks of `query_block` queries. Block `i` starts at `i·block`; every key any of its queries
can see is in the `keys = (b + f)·w + block` positions from `i·block - b·w` on. This holds for block-local windows too,
because there the block is the window. One Gather puts these spans side by side. Additive biases hide what a query must
not see: `[block, keys]` for the window, the same for all blocks, and `[blocks, 1, keys]` for positions outside the
sequence and masked keys. The two are added to each other before they are added to the scores, which have every head:
one pass over the largest tensor instead of two.

Common properties of all nodes that share the function, such as the layout and length of static files, save work
(`function_properties.py`). If the sequence is no longer than a block's keys, every block takes all of them and nothing
is gathered. Long sequences are computed in parts, some blocks at a time, so that only one part's gathered keys and
scores are in memory at a time, and near the cache. Parts that see no position outside the sequence need only the
window's bias. None of this changes a result by a bit.

It computes in fp32 whatever the inputs' dtype, as the kernels do with their scores: rounding scores to fp16 was the
largest error of an fp16 file, and on the CPU fp16 is slower, not faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import and_
from typing import Any

import onnx_ir as ir

from ...core.nodes.attention import LOWEST_BIAS, SELF_SCORE, VARIANT_BY_OP_TYPE, NodeVariant
from ...core.nodes.grouped import GroupedVariant
from .function_parts import attribute, define, integers, real
from .function_properties import FunctionProperties, Part, properties_of

# The bias of a masked key: far below `LOWEST_BIAS`, so that a masked key has no weight beside a kept one whatever the
# kept one's bias is. Finite, so that no row becomes NaN.
MASKED_SCORE = -1e34
# The bias of a key outside the window or the sequence, far below a masked one whatever that one's bias is: if all
# visible keys of a row are masked, its weights spread over those keys alone, whose values are zero. Two can be added.
HIDDEN_SCORE = -1e37
# How far below a row's largest score the others may lie: e^-75 is nothing beside 1 in fp32, and a normal number even
# after the division by a row's sum.
_DEPTH = 75.0
# The largest floor. Where scores are larger, subtracting `_DEPTH` from them could change nothing.
_MOST_FLOOR = 1e8


class Span:
    """The sizes of a block and its span of keys, as scalar int64 tensors of the graph.

    For a grouped node (`core.nodes.grouped`) a block is no longer than the sequence.
    """

    def __init__(self, op: Any, length: Any, *, grouped: bool = False) -> None:
        self.zero, self.one = op.Constant(value_int=0), op.Constant(value_int=1)
        self.length = length
        self.grouped = grouped
        self.window = attribute(op, "window_size")
        self.block = attribute(op, "query_block")
        if grouped:
            self.block = op.Max(op.Min(self.block, length), self.one)
        self.backward = op.Mul(attribute(op, "look_backward"), self.window)
        self.forward = op.Mul(attribute(op, "look_forward"), self.window)
        self.keys = op.Add(op.Add(self.backward, self.forward), self.block)
        self.blocks = op.Div(op.Sub(op.Add(length, self.block), self.one), self.block)
        # Positions relative to the block's first query: [block, 1] and [1, keys].
        self.query_offset = op.Unsqueeze(self.range(op, self.block), integers(op, 1))
        self.key_offset = op.Unsqueeze(op.Sub(self.range(op, self.keys), self.backward), integers(op, 0))
        # Where each block starts: [blocks, 1].
        self.block_start = op.Unsqueeze(op.Mul(self.range(op, self.blocks), self.block), integers(op, 1))

    def range(self, op: Any, end: Any) -> Any:
        """Build the vector `0, 1, … end - 1`."""
        return op.Range(self.zero, end, self.one)


def _window_bias(op: Any, span: Span, query: Any, key: Any, start: Any) -> Any:
    """Build the window's bias in fp32: 0 where a query sees a key, by the interval of `core.geometry`.

    Args:
        op: the builder.
        span: the sizes of the block.
        query: positions of queries.
        key: positions of keys, broadcast against the queries.
        start: positions where the queries' blocks start, counted from the same origin.
    """
    causal, exact = (op.Cast(attribute(op, name), to=ir.DataType.BOOL) for name in ("causal", "exact_windowsize"))
    first = op.Sub(op.Where(exact, query, start), span.backward)
    window_end = op.Add(start, op.Sub(op.Add(span.window, span.forward), span.one))
    last = op.Where(exact, op.Add(query, span.forward), window_end)
    last = op.Where(causal, query, last)
    visible = op.And(op.GreaterOrEqual(key, first), op.LessOrEqual(key, last))
    if span.grouped:
        return op.Where(visible, real(op, 0.0), real(op, HIDDEN_SCORE))
    self_score = op.Mul(op.Cast(attribute(op, "shared_qk"), to=ir.DataType.FLOAT), real(op, SELF_SCORE))
    seen = op.Where(op.Equal(key, query), self_score, real(op, 0.0))
    return op.Where(visible, seen, real(op, HIDDEN_SCORE))


def _given_bias(op: Any, span: Span, bias: Any) -> Any:
    """Return the additive bias as fp32 `[H, block, keys]`, 0 for a token's score with itself under shared_qk."""
    shared = op.Cast(attribute(op, "shared_qk"), to=ir.DataType.BOOL)
    itself = op.And(op.Equal(span.key_offset, span.query_offset), shared)
    bias = op.Max(op.Cast(bias, to=ir.DataType.FLOAT), real(op, LOWEST_BIAS))
    return op.Where(itself, real(op, 0.0), bias)


def _outside_bias(op: Any, span: Span, position: Any) -> Any:
    """Build the bias that hides positions outside the sequence, fp32 `[blocks, 1, keys]`."""
    inside = op.And(op.GreaterOrEqual(position, span.zero), op.Less(position, span.length))
    return op.Unsqueeze(op.Where(inside, real(op, 0.0), real(op, HIDDEN_SCORE)), integers(op, 1))


def mask_bias(op: Any, kept: Any) -> Any:
    """Build the bias that hides masked keys, fp32 `[B, 1, blocks, 1, keys]`; `kept` is `[B, blocks, keys]`."""
    return op.Unsqueeze(op.Where(kept, real(op, 0.0), real(op, MASKED_SCORE)), integers(op, 1, 3))


def _xpos_scale(op: Any, span: Span, head_dim: Any, offset: Any, sign: float) -> Any:
    """Build `ζ^(±(offset - centre) / base)`, `[len(offset), D]` fp32; local to the block, so it cannot overflow."""
    dim = op.Cast(head_dim, to=ir.DataType.FLOAT)
    half = op.Div(head_dim, op.Add(span.one, span.one))
    channel = op.Cast(span.range(op, half), to=ir.DataType.FLOAT)
    twice = op.Add(channel, channel)
    zeta = op.Div(op.Add(twice, op.Mul(dim, real(op, 0.4))), op.Mul(dim, real(op, 1.4)))
    # The same for both halves of a head. Heads of an odd width make Gather read a missing channel and fail. Otherwise a
    # width of one channel would count as none, and onnxruntime leaves sums of nothing uninitialised.
    both = span.range(op, head_dim)
    second = op.Cast(op.GreaterOrEqual(both, half), to=ir.DataType.INT64)
    zeta = op.Unsqueeze(op.Gather(zeta, op.Sub(both, op.Mul(second, half))), integers(op, 0))
    centre = op.Cast(op.Sub(op.Add(span.block, span.forward), span.backward), to=ir.DataType.FLOAT)
    centre = op.Mul(centre, real(op, 0.5))
    distance = op.Mul(op.Sub(op.Cast(offset, to=ir.DataType.FLOAT), centre), real(op, sign))
    return op.Pow(zeta, op.Div(distance, attribute(op, "xpos_scale_base")))


def heads_first(op: Any, x: Any, properties: FunctionProperties) -> Any:
    """Transpose a tensor in the node's layout to `[B, H, N, D]`, or back."""
    return x if properties.heads_first else op.Transpose(x, perm=ir.RefAttr("perm", "perm", ir.AttributeType.INTS))


def without_masked(op: Any, mask: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Replace masked keys and values by 0; not multiply them by 0, because they may be infinite or NaN."""
    kept, hidden = op.Unsqueeze(mask, integers(op, 1, 3)), real(op, 0.0)
    return op.Where(kept, key, hidden), op.Where(kept, value, hidden)


def _with_zero_row(op: Any, x: Any) -> Any:
    """Return all heads' rows `[B·H·N, D]` and one of zeros behind them, which spans take for masked keys.

    That is faster than `without_masked`, whose Where runs on one thread in onnxruntime.
    """
    width = op.Shape(x, start=3, end=4)
    zeros = op.Expand(real(op, 0.0), op.Concat(integers(op, 1), width, axis=0))
    return op.Concat(op.Reshape(x, op.Concat(integers(op, -1), width, axis=0)), zeros, axis=0)


def _body(variant: NodeVariant, properties: FunctionProperties) -> Any:
    """Return the Python function that traces the ONNX function of one op type."""

    def trace(op: Any, query: Any, key: Any, value: Any, *optional: Any) -> Any:
        extra = dict(zip(variant.input_names[3:], optional, strict=True))
        given, mask = query, extra.get("key_mask")
        query, key, value = (op.Cast(heads_first(op, x, properties), to=ir.DataType.FLOAT) for x in (query, key, value))
        length = op.Squeeze(op.Shape(query, start=2, end=3), integers(op, 0))
        head_dim = op.Shape(query, start=3, end=4)
        span = Span(op, length)

        if not properties.aligned:  # the last block repeats the last query; its extra rows are cut off below
            rows = span.range(op, op.Mul(span.blocks, span.block))
            query = op.Gather(query, op.Min(rows, op.Sub(length, span.one)), axis=2)
        same, rest = integers(op, 0, 0), integers(op, -1)
        row_shape = op.Concat(same, rest, head_dim, axis=0)
        block_shape = op.Concat(same, rest, op.Unsqueeze(span.block, integers(op, 0)), head_dim, axis=0)
        scale, key_scale = attribute(op, "scale"), None
        if variant.has_xpos:
            scalar_dim = op.Squeeze(head_dim, integers(op, 0))
            ahead = op.Add(span.query_offset, span.forward)
            scale = op.Mul(scale, _xpos_scale(op, span, scalar_dim, ahead, 1.0))
            key_scale = _xpos_scale(op, span, scalar_dim, op.Transpose(span.key_offset, perm=[1, 0]), -1.0)
        laid_out = lay_out(op, span, key, value, mask, properties, extra.get("attn_bias"), key_scale)
        # Reshaped part by part: runtimes copy what they reshape if it is an input or output of the file.
        outputs = []
        for rows, *where in cut(op, span, query, properties.parts, rows=span.block):
            blocks = op.Mul(op.Reshape(rows, block_shape), scale)  # [B, H, blocks, block, D]
            part = op.CastLike(_attend(op, blocks, *laid_out.part(op, *where)), given)
            outputs.append(op.Reshape(part, row_shape))
        output = outputs[0] if len(outputs) == 1 else op.Concat(*outputs, axis=2)
        if not properties.aligned:
            end = op.Unsqueeze(length, integers(op, 0))
            output = op.Slice(output, integers(op, 0), end, integers(op, 2))
        return heads_first(op, output, properties)

    return trace


def cut(
    op: Any, span: Span, query: Any, parts: tuple[Part, ...], axis: int = 2, rows: Any | None = None
) -> Iterator[tuple[Any, Any, bool]]:
    """Yield each part's queries, its block starts `[blocks, 1]` and whether it is inside.

    Args:
        op: the builder.
        span: the sizes of the block.
        query: all queries, `[…, blocks, block, D]`, or `[…, rows, D]`.
        parts: `FunctionProperties.parts`.
        axis: the axis of the blocks, or of the rows.
        rows: rows of a block, if the queries are laid out by rows.
    """
    if not parts:
        yield query, span.block_start, False
        return
    sizes = integers(op, *(part.blocks for part in parts))
    queries = op.Split(query, sizes if rows is None else op.Mul(sizes, rows), axis=axis, _outputs=len(parts))
    starts = op.Split(span.block_start, sizes, axis=0, _outputs=len(parts))
    yield from zip(queries, starts, (part.inside for part in parts), strict=True)


def _attend(op: Any, query: Any, key: Any, value: Any, biases: Sequence[Any]) -> Any:
    """Compute `softmax(q·kᵀ + biases)·v`, `[B, H, blocks, block, D]`; queries are scaled."""
    scores = op.MatMul(query, op.Transpose(key, perm=[0, 1, 2, 4, 3]))
    for bias in biases:
        scores = op.Add(scores, bias)
    return op.MatMul(softmax(op, scores) if biases else op.Softmax(scores, axis=-1), value)


def softmax(op: Any, scores: Any) -> Any:
    """Compute the softmax of rows in which some scores are hidden, that is, very negative.

    Softmax alone computes numbers below the smallest normal one of fp32 for such keys, and an Intel core takes some
    hundred cycles for each vector that has one: far more than it takes to raise the scores to a floor first.

    The floor of negative rows is a thousandth lower, so that it is less than their largest score however large their
    numbers are. Rows without any key, whose largest score is `MASKED_SCORE`, keep weights of zero this way.
    """
    top = op.ReduceMax(scores, integers(op, -1), keepdims=1)
    floor = op.LeakyRelu(op.Sub(top, real(op, _DEPTH)), alpha=1.001)
    return op.Softmax(op.Max(scores, op.Min(floor, real(op, _MOST_FLOOR))), axis=-1)


def lay_out(
    op: Any,
    span: Span,
    key: Any,
    value: Any,
    mask: Any,
    properties: FunctionProperties,
    given: Any = None,
    key_scale: Any = None,
) -> _WholeSequence | _OwnSpans:
    """Arrange keys and values for the blocks of queries, in the way that saves most under these properties.

    Args:
        op: the builder.
        span: the sizes of the block.
        key: keys `[B, H, N, D]`.
        value: their values.
        mask: the input `key_mask`, or None.
        properties: properties of every node of the op type.
        given: the input `attn_bias`, or None.
        key_scale: the keys' factors of the xpos decay, `[keys, D]`, or None.

    Returns:
        An object whose `part` gives the keys, values and biases of some blocks.
    """
    if properties.whole:
        return _WholeSequence(op, span, key, value, mask, window_hides=not properties.all_seen)
    return _OwnSpans(op, span, key, value, mask, given, key_scale, in_parts=bool(properties.parts))


class _OwnSpans:
    """The spans of keys and values if each block has a separate one."""

    def __init__(
        self, op: Any, span: Span, key: Any, value: Any, mask: Any, given: Any, key_scale: Any, *, in_parts: bool
    ) -> None:
        self._span, self._mask, self._key_scale = span, mask, key_scale
        self._key, self._value = (x if mask is None else _with_zero_row(op, x) for x in (key, value))
        if mask is not None:
            batch_heads = op.Shape(key, start=0, end=2)
            sequences = op.ReduceProd(batch_heads, keepdims=0)
            first = op.Mul(op.Range(span.zero, sequences, span.one), span.length)
            self._first = op.Reshape(first, op.Concat(batch_heads, integers(op, 1, 1), axis=0))  # [B, H, 1, 1]
            self._end = op.Mul(sequences, span.length)
        # Added in advance, two constant biases would be stored by runtimes as `[blocks, block, keys]` for every layer.
        # So the few parts that are not inside add them one after the other.
        self._apart = in_parts
        self._window = _window_bias(op, span, span.query_offset, span.key_offset, span.zero)  # [block, keys]
        # A given bias has every head, so it is not added to biases that differ between blocks.
        self._by_head = None
        if given is not None:
            self._by_head = op.Add(op.Unsqueeze(_given_bias(op, span, given), integers(op, 1)), self._window)

    def part(self, op: Any, start: Any, inside: bool) -> tuple[Any, Any, list[Any]]:
        """Return keys and values `[B, H, blocks or 1, keys, D]` of some blocks, and the biases of their scores.

        Args:
            op: the builder.
            start: where the blocks start, `[blocks, 1]`.
            inside: whether all of their keys are inside the sequence.
        """
        span = self._span
        index = position = op.Add(start, span.key_offset)  # [blocks, keys]
        if not inside:
            index = op.Max(op.Min(position, op.Sub(span.length, span.one)), span.zero)
        own: list[Any] = []
        if self._mask is None:
            key, value = op.Gather(self._key, index, axis=2), op.Gather(self._value, index, axis=2)
        else:
            kept = op.Gather(self._mask, index, axis=1)  # [B, blocks, keys]
            own = [mask_bias(op, kept)]
            places = op.Where(op.Unsqueeze(kept, integers(op, 1)), op.Add(self._first, index), self._end)
            key, value = op.Gather(self._key, places, axis=0), op.Gather(self._value, places, axis=0)
        if self._key_scale is not None:
            key = op.Mul(key, self._key_scale)
        own += [] if inside else [_outside_bias(op, span, position)]
        if self._by_head is not None:
            return key, value, [self._by_head, *_sum(op, own)]
        if self._apart and self._mask is None:
            return key, value, [self._window, *own]
        return key, value, _sum(op, [*own, self._window])


class _WholeSequence:
    """The keys and values of a short sequence: one set for all blocks, `[B, H, 1, N, D]`."""

    def __init__(self, op: Any, span: Span, key: Any, value: Any, mask: Any | None, *, window_hides: bool) -> None:
        axis = integers(op, 2)
        if mask is not None:
            key, value = without_masked(op, mask, key, value)
        self._span, self._window_hides = span, window_hides
        self._key, self._value = op.Unsqueeze(key, axis), op.Unsqueeze(value, axis)
        self._position = op.Unsqueeze(span.range(op, span.length), integers(op, 0))  # [1, N]
        self._masked = [] if mask is None else [mask_bias(op, op.Gather(mask, self._position, axis=1))]

    def part(self, op: Any, start: Any, inside: bool) -> tuple[Any, Any, list[Any]]:
        """Return the same values as `_OwnSpans.part`."""
        if not self._window_hides:
            return self._key, self._value, self._masked
        start = op.Unsqueeze(start, integers(op, 2))  # [blocks, 1, 1]
        query = op.Add(start, self._span.query_offset)  # [blocks, block, 1]
        window = _window_bias(op, self._span, query, self._position, start)  # [blocks, block, N]
        return self._key, self._value, _sum(op, [window, *self._masked])


def _sum(op: Any, biases: Sequence[Any]) -> list[Any]:
    """Add small biases into one, because each addition to the scores is a pass over the largest tensor."""
    return [reduce(op.Add, biases)] if biases else []


def build_attention(op_type: str, opset: int, nodes: Sequence[ir.Node]) -> ir.Function:
    """Build the ONNX function for all nodes of an op type of `core.nodes.attention`; see `functions.Builder`."""
    variant = VARIANT_BY_OP_TYPE[op_type]
    return attention_function(variant, opset, shared_properties(variant, nodes))


def shared_properties(variant: NodeVariant | GroupedVariant, nodes: Sequence[ir.Node]) -> FunctionProperties:
    """Return the properties that hold for all nodes of an op type."""
    properties = (
        properties_of(variant, {name: x.value for name, x in node.attributes.items()}, *_sizes_of(node))
        for node in nodes
    )
    return reduce(and_, properties)


def _sizes_of(node: ir.Node) -> tuple[int | None, int | None]:
    """Return the length a node was traced at, and how many sequences of one head, `B·H`; None for a dynamic one."""
    query = node.inputs[0]
    assert query is not None and query.shape is not None
    batch, heads, length, _ = (query.shape[axis] for axis in node.attributes["perm"].as_ints())
    sequences = batch * heads if isinstance(batch, int) and isinstance(heads, int) else None
    return length if isinstance(length, int) else None, sequences


def attention_function(variant: NodeVariant, opset: int, properties: FunctionProperties | None = None) -> ir.Function:
    """Build the model-local ONNX function of one op type.

    Args:
        variant: the op type.
        opset: opset of the function; it must be the model's.
        properties: properties of every node of that type; by default none, and the function serves all nodes.
    """
    body = _body(variant, properties or FunctionProperties())
    return define(body, variant.op_type, variant.input_names, variant.attribute_names, opset)
