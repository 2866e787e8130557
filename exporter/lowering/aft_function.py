"""Build the ONNX functions of the AFT-local nodes: their definition in standard operators, stored in the file.

The sequence is cut into blocks of `L` positions, `L` a power of two above the reach of the biases, and a row's sums
are matrix products. Every product has a stabiliser that belongs to keys which all of its rows see, so that the sum of
the weights is at least e^-60, whatever the keys (`core.nodes.aft.WIDEST_BIASES`):

- Not causal: every row sees every key, so one maximum per channel serves all. A block's rows are multiplied with the
  keys of three blocks, and with one row more for all other blocks, whose bias is 0.
- Causal: the keys before a block are seen by all of its rows: one product with the block before and one row for
  everything further back. Inside the block, the second half of the rows sees all keys of the first half; then the same
  within both halves, and so on: `log2 L` levels of small products, each with the maximum of its keys.

Only exponents are subtracted, so no digit cancels, and no row is multiplied with a key that it does not see. The sums
over other blocks come from doubling, in `log2(T/L)` additions. Nothing loops, and every tensor is linear in `T`. Wide
inputs are computed in parts, some channels at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ...core.nodes.aft import AFT_VARIANT_BY_OP_TYPE, HIDDEN_KEY, LOWEST_KEY, AftVariant
from ...core.nodes.attention import PLUGIN_ATTRIBUTES
from .function_parts import FIRST_INT64, LAST_INT64, define, integers, real

# Products with fewer keys are slower than sums.
_SMALLEST_BLOCK = 8
# By whether a node is causal: keys of one part in bytes, the least number of parts, and the fewest channels of a part.
# Only one part's tensors are in memory at a time, near the cache. Causal nodes have more of them.
_PART_BYTES = {True: 1 << 19, False: 1 << 20}
_LEAST_PARTS = {True: 9, False: 4}
_FEWEST_CHANNELS = {True: 8, False: 32}


@dataclass(frozen=True)
class _Sizes:
    """The sizes that determine a function's structure; it serves every node up to these sizes.

    Args:
        block: positions of a block, a power of two above the reach of every node's biases.
        doublings: rounds of doubling after which the sums go over all blocks.
        aligned: every node's length is a multiple of the block, so nothing is padded.
        parts: groups of channels that are computed one after the other.
    """

    block: int
    doublings: int
    aligned: bool
    parts: int


def _sizes(variant: AftVariant, nodes: Sequence[ir.Node]) -> _Sizes:
    """Return sizes that are large enough for all of these nodes.

    Raises:
        ValueError: a node's biases have no static shape.
    """
    shapes = []
    for node in nodes:
        shape = _shape(node, 3)
        if shape is None:
            raise ValueError(f"{node.name}: the shape of position_bias must be static")
        shapes.append(shape)
    lengths = {length for length, _ in shapes}
    all_alike = len(lengths) == len({_width(node) for node in nodes}) == 1
    reach = max(variant.reach(columns) for _, columns in shapes)
    block = max(_SMALLEST_BLOCK, 1 << reach.bit_length())  # the least power of two above the reach
    blocks = -(-max(lengths) // block)
    return _Sizes(
        block=block,
        doublings=(blocks - 1).bit_length(),
        aligned=all(length % block == 0 for length in lengths),
        parts=_parts(variant, shapes[0][0], _width(nodes[0])) if all_alike else 1,
    )


def _shape(node: ir.Node, index: int) -> list[int] | None:
    """Return the shape of an input; None if it is not static."""
    value = node.inputs[index]
    if value is None or value.shape is None:
        return None
    sizes = [size for size in value.shape if isinstance(size, int)]
    return sizes if len(sizes) == len(value.shape) else None


def _width(node: ir.Node) -> int | None:
    """Return the number of channels of all sequences of a node; None if it is dynamic."""
    shape = _shape(node, 1)
    return None if shape is None else math.prod(shape[1:])


def _parts(variant: AftVariant, length: int, width: int | None) -> int:
    """Return how many groups of channels nodes of this size compute one after the other; 1 for an unknown width."""
    if width is None:
        return 1
    causal = variant.causal
    most = min(_PART_BYTES[causal] // (4 * length), width // _LEAST_PARTS[causal])
    return -(-width // min(max(_FEWEST_CHANNELS[causal], most), width))


def _part(op: Any, x: Any, axis: int, start: int, end: int) -> Any:
    """Slice one axis."""
    return op.Slice(x, *(integers(op, value) for value in (start, end, axis)))


def _shifted(op: Any, x: Any, count: int, fill: float) -> Any:
    """Move `[N, …, …]` by `count` along its first axis, of any length, and fill the start."""
    longer = op.Pad(x, integers(op, count, 0, 0, 0, 0, 0), real(op, fill))
    return _part(op, longer, 0, 0, -count)


def _reversed(op: Any, x: Any) -> Any:
    """Reverse the first axis."""
    return op.Slice(x, *(integers(op, value) for value in (-1, FIRST_INT64, 0, -1)))


class _Biases:
    """Turn the biases into weights of products, from `position_bias` with rows padded to a multiple of the block."""

    def __init__(self, op: Any, variant: AftVariant, block: int, bias: Any, missing: Any) -> None:
        columns = op.Shape(bias, start=1, end=2)
        one = integers(op, 1)
        self._reach = op.Sub(columns, one)
        if not variant.causal:
            self._reach = op.Div(self._reach, integers(op, 2))
        # The squares reach two blocks back, and as far forward if there are later keys.
        self._margin = 2 * block
        zero, margin = integers(op, 0), integers(op, self._margin)
        self._wide = op.Pad(bias, op.Concat(zero, margin, missing, zero if variant.causal else margin, axis=0))
        self._squares: dict[tuple[int, int, int, bool], Any] = {}  # the parts share them
        # No logit of a row is above its largest bias, or 0, and a key.
        self._top = op.Max(op.ReduceMax(self._wide, one, keepdims=1), real(op, 0.0))

    def _columns(self, op: Any, first: int, count: int) -> Any:
        """Return the biases at the offsets `first … first + count - 1` of `j - i`, `[T, count]`."""
        start = op.Add(self._reach, integers(op, self._margin + first))
        return op.Slice(self._wide, start, op.Add(start, integers(op, count)), integers(op, 1))

    def of_itself(self, op: Any, block: int) -> Any:
        """Return the weight of each position's own key, `[T/block, block, 1]`."""
        weight = op.Exp(op.Sub(self._columns(op, 0, 1), self._top))
        return op.Reshape(weight, integers(op, -1, block, 1))

    def square(self, op: Any, rows: int, first: int, width: int, *, second_half: bool = False) -> Any:
        """Return the weights of products, `[T/rows, rows, width]`; the same for equal arguments.

        Row `r` of a group of rows has the weight of the offset `first + p - r` in column `p`: its biases are skewed.
        With `second_half` the groups are the second halves of groups twice as large.
        """
        key = (rows, first, width, second_half)
        if key not in self._squares:
            self._squares[key] = self._made(op, *key)
        return self._squares[key]

    def _made(self, op: Any, rows: int, first: int, width: int, second_half: bool) -> Any:
        count = width + rows - 1
        biases, top = self._columns(op, first - rows + 1, count), self._top
        group = 2 * rows if second_half else rows
        biases = op.Reshape(biases, integers(op, -1, group, count))
        top = op.Reshape(top, integers(op, -1, group, 1))
        if second_half:
            biases, top = (_part(op, x, 1, rows, group) for x in (biases, top))
        if rows > 1:
            # Rows of `count` numbers, read as rows of one less, each begin one number further.
            flat = op.Reshape(biases, integers(op, 0, -1))
            flat = _part(op, flat, 1, rows - 1, rows - 1 + rows * (count - 1))
            biases = _part(op, op.Reshape(flat, integers(op, 0, rows, count - 1)), 2, 0, width)
        return op.Exp(op.Sub(biases, top))


def _in_blocks(op: Any, x: Any, size: int) -> Any:
    """Reshape `[1 or more, …, F]` to `[…, size, F]`."""
    return op.Reshape(x, integers(op, -1, size, 0))


def _over_all(op: Any, sizes: _Sizes, biases: _Biases, keys: Any, values: Any) -> tuple[Any, Any]:
    """Compute numerator and denominator if every row sees every key; keys and values are `[1, T, F]`."""
    block = sizes.block
    weights = op.Exp(op.Sub(keys, op.ReduceMax(keys, integers(op, 1), keepdims=1)))
    # [T/L, L, F]
    parts = [_in_blocks(op, x, block) for x in (op.Mul(weights, values), weights)]
    sums = op.Concat(*(op.ReduceSum(x, integers(op, 1), keepdims=1) for x in parts), axis=1)
    both = op.Concat(sums, _reversed(op, sums), axis=1)
    both = _shifted(op, both, 2, 0.0)  # the block before and the one after are in the product
    for level in range(sizes.doublings):
        both = op.Add(both, _shifted(op, both, 1 << level, 0.0))
    far = op.Add(_part(op, both, 1, 0, 2), _reversed(op, _part(op, both, 1, 2, 4)))
    square = biases.square(op, block, -block - 1, 3 * block + 1)
    results = []
    for index, x in enumerate(parts):
        around = op.Pad(x, integers(op, 1, 0, 0, 1, 0, 0))
        span = [_part(op, around, 0, first, last) for first, last in ((0, -2), (1, -1), (2, LAST_INT64))]
        results.append(op.MatMul(square, op.Concat(_part(op, far, 1, index, index + 1), *span, axis=1)))
    return results[0], results[1]


def _merged(op: Any, first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Any, Any]:
    """Merge maxima and sums of two sets of keys."""
    peak = op.Max(first[0], second[0])
    return peak, op.Add(*(op.Mul(sums, op.Exp(op.Sub(top, peak))) for top, sums in (first, second)))


def _behind(op: Any, sizes: _Sizes, biases: _Biases, keys: Any, values: Any) -> tuple[Any, Any, Any]:
    """Compute maximum `[T/L, 1, F]`, numerator and denominator `[T/L, L, F]` of the keys before each block."""
    block, axis = sizes.block, integers(op, 1)
    top = op.ReduceMax(keys, axis, keepdims=1)
    weights = op.Exp(op.Sub(keys, top))
    sums = op.Concat(*(op.ReduceSum(x, axis, keepdims=1) for x in (op.Mul(weights, values), weights)), axis=1)
    for level in range(sizes.doublings):
        earlier = _shifted(op, top, 1 << level, HIDDEN_KEY), _shifted(op, sums, 1 << level, 0.0)
        top, sums = _merged(op, (top, sums), earlier)
    # Of all keys before the block, and of those before the block before it.
    peak = _shifted(op, top, 1, HIDDEN_KEY)
    far = op.Mul(_shifted(op, sums, 2, 0.0), op.Exp(op.Sub(_shifted(op, top, 2, HIDDEN_KEY), peak)))
    weights = op.Exp(op.Sub(_shifted(op, keys, 1, HIDDEN_KEY), peak))
    square = biases.square(op, block, -block - 1, block + 1)
    near = op.Mul(weights, _shifted(op, values, 1, 0.0)), weights
    num, den = (
        op.MatMul(square, op.Concat(_part(op, far, 1, index, index + 1), x, axis=1)) for index, x in enumerate(near)
    )
    return peak, num, den


def _inside(op: Any, sizes: _Sizes, biases: _Biases, keys: Any, values: Any) -> tuple[Any, Any, Any]:
    """Compute maximum, numerator and denominator of the keys of each row's own block, `[T/L, L, F]`."""
    block = sizes.block
    own = biases.of_itself(op, block)
    peak, num = keys, op.Mul(own, values)
    den = op.Expand(own, op.Shape(keys))
    half = 1
    while half < block:
        group = 2 * half
        first_keys = _part(op, _in_blocks(op, keys, group), 1, 0, half)
        first_values = _part(op, _in_blocks(op, values, group), 1, 0, half)
        state = [_in_blocks(op, x, group) for x in (peak, num, den)]
        halves = [op.Split(x, axis=1, num_outputs=2, _outputs=2) for x in state]
        firsts, seconds = zip(*halves, strict=True)
        top = _part(op, firsts[0], 1, half - 1, half)  # of all keys of the first half
        weights = op.Exp(op.Sub(first_keys, top))
        square = biases.square(op, half, -half, half, second_half=True)
        peak = op.Max(seconds[0], top)
        kept, scale = op.Exp(op.Sub(seconds[0], peak)), op.Exp(op.Sub(top, peak))
        added = [
            op.MatMul(square, x) if half > 1 else op.Mul(square, x) for x in (op.Mul(weights, first_values), weights)
        ]
        sums = [op.Add(op.Mul(old, kept), op.Mul(new, scale)) for old, new in zip(seconds[1:], added, strict=True)]
        peak, num, den = (op.Concat(a, b, axis=1) for a, b in zip(firsts, (peak, *sums), strict=True))
        half = group
    return tuple(_in_blocks(op, x, block) for x in (peak, num, den))  # type: ignore[return-value]


def _causal(op: Any, sizes: _Sizes, biases: _Biases, keys: Any, values: Any) -> tuple[Any, Any]:
    """Compute numerator and denominator if every row sees the keys up to itself; keys and values are `[1, T, F]`."""
    keys, values = (_in_blocks(op, x, sizes.block) for x in (keys, values))
    peak, num, den = _inside(op, sizes, biases, keys, values)
    if not sizes.doublings:  # one block
        return num, den
    before, far_num, far_den = _behind(op, sizes, biases, keys, values)
    top = op.Max(peak, before)
    kept, scale = op.Exp(op.Sub(peak, top)), op.Exp(op.Sub(before, top))
    num, den = (op.Add(op.Mul(near, kept), op.Mul(far, scale)) for near, far in ((num, far_num), (den, far_den)))
    return num, den


def _body(variant: AftVariant, sizes: _Sizes) -> Any:
    """Return the Python function that traces the ONNX function of one op type."""

    def trace(op: Any, gate: Any, keys: Any, values: Any, bias: Any, *mask: Any) -> Any:
        keys = op.Max(keys, real(op, LOWEST_KEY))
        if mask:
            kept = op.Unsqueeze(op.Transpose(mask[0], perm=[1, 0]), integers(op, 2))
            # The values too: a hidden key's weight is 0, but 0·NaN would be NaN.
            keys, values = op.Where(kept, keys, real(op, HIDDEN_KEY)), op.Where(kept, values, real(op, 0.0))
        length, zero = op.Shape(gate, start=0, end=1), integers(op, 0)
        # Channels of all sequences side by side: [1, T, F].
        keys, values = (op.Unsqueeze(op.Flatten(x, axis=1), zero) for x in (keys, values))
        missing = zero
        if not sizes.aligned:  # hidden keys make the last block whole
            missing = op.Mod(op.Neg(length), integers(op, sizes.block))
            pads = op.Concat(integers(op, 0, 0, 0, 0), missing, zero, axis=0)
            keys, values = op.Pad(keys, pads, real(op, HIDDEN_KEY)), op.Pad(values, pads)
        biases = _Biases(op, variant, sizes.block, bias, missing)
        compute = _causal if variant.causal else _over_all
        if sizes.parts == 1:
            mean = op.Div(*compute(op, sizes, biases, keys, values))
        else:
            cut = [op.Split(x, axis=2, num_outputs=sizes.parts, _outputs=sizes.parts) for x in (keys, values)]
            parts = [op.Div(*compute(op, sizes, biases, *part)) for part in zip(*cut, strict=True)]
            mean = op.Concat(*parts, axis=2)
        if not sizes.aligned:
            mean = op.Slice(op.Reshape(mean, integers(op, 1, -1, 0)), zero, length, integers(op, 1))
        return op.Mul(op.Sigmoid(gate), op.Reshape(mean, op.Shape(gate)))

    return trace


def build_aft(op_type: str, opset: int, nodes: Sequence[ir.Node]) -> ir.Function:
    """Build the ONNX function of an op type of `core.nodes.aft`; see `functions.Builder`.

    Raises:
        ValueError: a node's biases have no static shape.
    """
    variant = AFT_VARIANT_BY_OP_TYPE[op_type]
    return define(_body(variant, _sizes(variant, nodes)), op_type, variant.input_names, PLUGIN_ATTRIBUTES, opset)
