"""Pass: compute a rotary embedding as one `RotateHeads` node, or `RotatePairs` if it turns neighbouring channels.

It finds `x·cosine + rotate_half(x)·sine` with `rotate_half((x₁, x₂)) = (−x₂, x₁)`, as most models write it, for tables
`[B, 1, N, D]` or `[B, N, 1, D]`. `x` may be a part of a head (partial rotary), and `B` one. The other way to write it
is `(x₁·cosine − x₂·sine, x₂·cosine + x₁·sine)`, with tables of half that width. Of neighbours it finds
`x·cosine + rotate_pairs(x)·sine` with `rotate_pairs((x₀, x₁, x₂, …)) = (−x₁, x₀, −x₃, …)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...core.nodes.fused import FUSED_DOMAIN
from ..graph_values import add_constant, replace_node
from .matching import cut_of, integers, maker, static

PAIRS = "RotatePairs"


def apply(model: Any) -> None:
    """Replace every rotary embedding of an `onnx_ir.Model`, in place."""
    tables = Tables(model.graph)
    for node in list(model.graph):
        if node.op_type == "Add" and node.domain == "":
            for x, cosine, sine, pairs in _rotations(node):
                heads_first = _heads_first(x, cosine)
                if heads_first is None or list(cosine.shape) != list(sine.shape):
                    continue
                made = (tables.cosine(cosine, heads_first, pairs), tables.sine(sine, heads_first, pairs))
                replace_node(node, PAIRS if pairs else "RotateHeads", [x, *made], domain=FUSED_DOMAIN)
                break
        elif node.op_type == "Concat" and node.domain == "" and (found := _by_halves(node)) is not None:
            x, *halves = found
            heads_first = _heads_first(x, halves[0], 2)
            if heads_first is not None and list(halves[0].shape) == list(halves[1].shape):
                cosine, sine = (tables.doubled(half) for half in halves)
                made = (tables.cosine(cosine, heads_first), tables.sine(sine, heads_first))
                replace_node(node, "RotateHeads", [x, *made], domain=FUSED_DOMAIN)


def _by_halves(node: Any) -> tuple[Any, Any, Any] | None:
    """Read a Concat as a rotation written by halves: `x`, and the tables of half its width."""
    value = node.outputs[0]
    if len(node.inputs) != 2 or value.shape is None or len(value.shape) != 4:
        return None
    difference, total = maker(node.inputs[0], "Sub"), maker(node.inputs[1], "Add")
    if difference is None or total is None or node.attributes["axis"].value % 4 != 3:
        return None
    minuend, subtrahend = (maker(side, "Mul") for side in difference.inputs)
    if minuend is None or subtrahend is None:
        return None
    size = static(value, -1) or 0
    products = [{*(part.inputs if part else ())} for part in (maker(side, "Mul") for side in total.inputs)]
    for first, cosine in (minuend.inputs, minuend.inputs[::-1]):
        for second, sine in (subtrahend.inputs, subtrahend.inputs[::-1]):
            low, high = cut_of(first), cut_of(second)
            if low is None or high is None or low.source is not high.source or static(low.source, -1) != size:
                continue
            halves = (low[1:], high[1:]) == ((3, 0, size // 2), (3, size // 2, size))
            wanted = [{second, cosine}, {first, sine}]
            if halves and cosine.shape is not None and sine.shape is not None and wanted in (products, products[::-1]):
                return low.source, cosine, sine
    return None


def _rotations(node: Any) -> Iterator[tuple[Any, Any, Any, bool]]:
    """List the ways to read an Add as a rotation: `x`, cosine and sine, and whether neighbours turn."""
    for first, second in (node.inputs, node.inputs[::-1]):
        straight, turned = maker(first, "Mul"), maker(second, "Mul")
        if straight is None or turned is None:
            continue
        for half, sine in (turned.inputs, turned.inputs[::-1]):
            for x, pairs in ((_turned(half), False), (_turned_pairs(half), True)):
                if x is not None and x in straight.inputs:
                    yield x, straight.inputs[1 - list(straight.inputs).index(x)], sine, pairs


def _turned(value: Any) -> Any:
    """Return `x` of a value `(−x₂, x₁)`, else None."""
    node = maker(value, "Concat")
    if node is None or len(node.inputs) != 2 or value.shape is None:
        return None
    negated, first = maker(node.inputs[0], "Neg"), cut_of(node.inputs[1])
    second = None if negated is None else cut_of(negated.inputs[0])
    last = len(value.shape) - 1
    size = static(value, -1)
    if first is None or second is None or size is None or node.attributes["axis"].value % (last + 1) != last:
        return None
    halves = [(first.axis, first.start, first.end), (second.axis, second.start, second.end)]
    alike = first.source is second.source and static(first.source, -1) == size
    return first.source if alike and halves == [(last, 0, size // 2), (last, size // 2, size)] else None


def _turned_pairs(value: Any) -> Any:
    """Return `x` of a value `(−x₁, x₀, −x₃, x₂, …)`, else None."""
    flat = maker(value, "Reshape")
    stacked = None if flat is None else maker(flat.inputs[0], "Concat")
    if stacked is None or len(stacked.inputs) != 2 or value.shape is None or stacked.outputs[0].shape is None:
        return None
    last = len(value.shape)
    if stacked.attributes["axis"].value % (last + 1) != last or len(stacked.outputs[0].shape) != last + 1:
        return None
    second, first = (_single(part, last) for part in stacked.inputs)
    negated = maker(second, "Neg")
    odd, even = None if negated is None else _every_other(negated.inputs[0]), _every_other(first)
    if odd is None or even is None or odd[0] is not even[0] or (odd[1], even[1]) != (1, 0):
        return None
    source = odd[0]
    same = list(source.shape[:-1]) == list(value.shape[:-1]) and static(source, -1) == static(value, -1)
    return source if same else None


def _single(value: Any, axis: int) -> Any:
    """Return the input of an Unsqueeze by this axis that made a value, else None."""
    node = maker(value, "Unsqueeze")
    if node is None or value.shape is None or [x % len(value.shape) for x in integers(node.inputs[1]) or ()] != [axis]:
        return None
    return node.inputs[0]


def _every_other(value: Any) -> tuple[Any, int] | None:
    """Return the source of a value made of every second channel, and the first channel; None for every other value."""
    node = maker(value, "Slice")
    if node is None or len(node.inputs) != 5 or node.inputs[0].shape is None:
        return None
    source = node.inputs[0]
    starts, ends, axes, steps = (integers(given) for given in node.inputs[1:])
    size = static(source, -1)
    if size is None or size % 2 or starts not in ([0], [1]) or steps != [2] or not axes or not ends:
        return None
    whole = len(axes) == len(ends) == 1 and axes[0] % len(source.shape) == len(source.shape) - 1 and ends[0] >= size
    return (source, starts[0]) if whole else None


def _heads_first(x: Any, table: Any, parts: int = 1) -> bool | None:
    """Return whether `x` is `[B, H, N, D]`, not `[B, N, H, D]`, by the shape of its table; None if neither fits.

    The table has `D / parts` channels.
    """
    if table is None or x.shape is None or table.shape is None or len(x.shape) != 4 or len(table.shape) != 4:
        return None
    width = static(x, -1)
    if table.shape[0] not in (1, x.shape[0]) or width is None or static(table, -1) != width // parts:
        return None
    if table.shape[1] == 1 and table.shape[2] == x.shape[2]:
        return True
    return False if table.shape[2] == 1 and table.shape[1] == x.shape[1] else None


class Tables:
    """Make the tables of rotations, once for each value `[B, 1, N, D]` or `[B, N, 1, D]`.

    Args:
        graph: the graph that they are added to.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self._made: dict[tuple[Any, bool, bool], Any] = {}
        self._signed: dict[tuple[Any, bool], Any] = {}
        self._doubled: dict[Any, Any] = {}

    def doubled(self, value: Any) -> Any:
        """Return a table of half the width, repeated twice."""
        import onnx_ir as ir

        if value not in self._doubled:
            made = self._insert(value, ir.node("Concat", [value, value], {"axis": -1}))
            made.shape, made.dtype = ir.Shape([*value.shape[:3], 2 * value.shape[3]]), value.dtype
            self._doubled[value] = made
        return self._doubled[value]

    def cosine(self, value: Any, heads_first: bool, pairs: bool = False) -> Any:
        """Return a table with its halves on a new axis before the last, or its pairs on a new last axis."""
        import onnx_ir as ir

        if (value, heads_first, pairs) not in self._made:
            batch, size = ([] if value.shape[0] == 1 else [0]), value.shape[3] // 2
            channels = [size, 2] if pairs else [2, size]
            shape = [*([0, 1] if batch and heads_first else batch), -1, *([] if heads_first else [1]), *channels]
            name = f"shape_{heads_first}_{pairs}_{len(shape)}_{size}"
            made = self._insert(value, ir.node("Reshape", [value, self._constant(name, shape)]))
            sizes = list(value.shape)
            positions = sizes[2] if sizes[1] == 1 else sizes[1]
            whole = [positions, *([] if heads_first else [1]), *channels]
            made.shape = ir.Shape([sizes[0], *([1] if heads_first else []), *whole] if batch else whole)
            made.dtype = value.dtype
            self._made[value, heads_first, pairs] = made
        return self._made[value, heads_first, pairs]

    def sine(self, value: Any, heads_first: bool, pairs: bool = False) -> Any:
        """Return the table of sines in the same way, with the signs of the halves or pairs."""
        if (value, pairs) not in self._signed:
            import numpy as np
            import onnx_ir as ir

            half, signs = value.shape[3] // 2, np.array([-1, 1], value.dtype.numpy())
            signs = np.tile(signs, half) if pairs else np.repeat(signs, half)
            name = f"signs_{pairs}_{half}_{value.dtype.name.lower()}"
            made = self._insert(value, ir.node("Mul", [value, self._constant(name, signs)]))
            made.shape, made.dtype = value.shape, value.dtype
            self._signed[value, pairs] = made
        return self.cosine(self._signed[value, pairs], heads_first, pairs)

    def turned(self, table: Any, *, pairs: bool) -> Any:
        """Return the table for `[B, N, H, D]` that equals one for `[B, H, N, D]`."""
        return self.cosine(table.producer().inputs[0], False, pairs)

    def _insert(self, value: Any, node: Any) -> Any:
        """Add a node after the one that computes the value, or first if it is a constant or an input."""
        before = value.producer()
        if before is None:
            self.graph.insert_before(self.graph[0], node)
        else:
            node.metadata_props.update(before.metadata_props)
            self.graph.insert_after(before, node)
        return node.outputs[0]

    def _constant(self, name: str, content: Any) -> Any:
        import numpy as np

        return add_constant(self.graph, f"rotary_{name}", np.asarray(content))
