"""Measure how the tensors of a graph grow: compare its shapes at two sizes of one axis of its inputs.

Which axis is the sequence, and which of its own lengths a model makes from it, need not be known: a tensor that grows
with the square of any axis is found, whatever its own sizes are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import islice
from typing import NamedTuple

import onnx

from ...core.errors import UsageError
from ...onnx_graph.graph_values import all_graphs
from ...onnx_graph.library_errors import infer_shapes

Sizes = tuple[int | str, ...]

# An unknown dimension.
UNKNOWN = "?"
# A tensor that grows in two dimensions at least with this power of the axis is not linear in it: between 1, linear,
# and 2, square. Padding makes a square tensor grow a little slower.
_BEYOND_LINEAR = 1.4
# The name of an axis in the expression of a dimension; names before a parenthesis are functions, as `Min`.
_SYMBOL = re.compile(r"[A-Za-z_]\w*(?!\w|\s*\()")


class Growth(NamedTuple):
    """A graph that was traced at another size of one axis of its inputs.

    Args:
        axis: the axis in words: "axis 1 of x".
        size: its size in the file.
        other: the other size.
        model: the graph at the other size.
    """

    axis: str
    size: int
    other: int
    model: onnx.ModelProto


def grown(growth: Growth, model: onnx.ModelProto) -> Iterator[tuple[str, Sizes, Sizes]]:
    """Yield each tensor of a graph whose shape is another at the other size, with both shapes."""
    shapes, others = all_shapes(model), all_shapes(growth.model)
    for name, other in _same_tensors(model.graph, growth.model.graph):
        shape, changed = shapes.get(name), others.get(other)
        if shape is not None and changed is not None and len(shape) == len(changed) and shape != changed:
            yield name, shape, changed


def square_in(growth: Growth, model: onnx.ModelProto) -> list[str]:
    """List the tensors of a graph that grow with the square of the axis."""
    found = []
    for name, shape, changed in grown(growth, model):
        pairs = [(a, b) for a, b in zip(shape, changed, strict=True) if isinstance(a, int) and isinstance(b, int)]
        if _is_square(pairs, growth.size, growth.other):
            found.append(name)
    return list(dict.fromkeys(found))


def per_position(growth: Growth, model: onnx.ModelProto) -> int:
    """Return the most elements per position over all tensors that grow with the axis."""
    counts = (math.prod(x for x in shape if isinstance(x, int)) for _, shape, _ in grown(growth, model))
    return -(-max(counts, default=0) // growth.size)


def _same_tensors(graph: onnx.GraphProto, other: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """Pair the names of the same tensors of two graphs, which the exporter may number differently.

    Nodes are aligned by their operators in order. What is left over is paired by name where the same operator computes
    it, and so are tensors of subgraphs.
    """
    kinds, others = ([(x.domain, x.op_type) for x in g.node] for g in (graph, other))
    blocks = [(0, 0, len(kinds))]
    if kinds != others:
        found = SequenceMatcher(None, kinds, others, autojunk=False).get_matching_blocks()
        blocks = [(block.a, block.b, block.size) for block in found]
    paired = set[str]()
    for here, there, count in blocks:
        for a, b in zip(graph.node[here : here + count], other.node[there : there + count], strict=True):
            paired |= set(a.output)
            yield from zip(a.output, b.output, strict=False)
            yield from zip(a.input, b.input, strict=False)
    made = {name: node.op_type for node in other.node for name in node.output}
    for node in graph.node:
        yield from ((name, name) for name in node.output if name not in paired and made.get(name) == node.op_type)
    yield from ((value.name, value.name) for value in (*graph.input, *graph.output))
    for inner in islice(all_graphs(graph), 1, None):
        yield from ((plain.name, plain.name) for plain in inner.value_info)


def _is_square(dimensions: Sequence[tuple[int, int]], size: int, changed: int) -> bool:
    """Return whether a tensor grows with the square: in two dimensions, or in one that is their product.

    Args:
        dimensions: each at both sizes of the axis.
        size: of the axis in the file.
        changed: the other size.
    """
    differ = [(a, b) for a, b in dimensions if a != b]
    if len(differ) == 1:
        ((a, b),) = differ
        return a * changed**2 == b * size**2
    if len(differ) < 2 or any(0 in pair for pair in differ):
        return False
    return math.log(math.prod(a / b for a, b in differ)) / math.log(size / changed) > _BEYOND_LINEAR


def all_shapes(model: onnx.ModelProto) -> dict[str, Sizes]:
    """Return the shapes of all tensors of a model and its subgraphs, dynamic dimensions by their expression.

    Those that the file does not record, as of nodes that a quantizer added, are inferred.
    """
    shapes = _recorded(model)
    if all(name in shapes for name in _made(model)):
        return shapes
    try:
        return _recorded(infer_shapes(model)) | shapes
    except UsageError:  # what remains is told by `unjudged`
        return shapes


def _made(model: onnx.ModelProto) -> Iterator[str]:
    """Yield the names of what the nodes of the outermost graph compute."""
    return (name for node in model.graph.node for name in node.output if name)


def _recorded(model: onnx.ModelProto) -> dict[str, Sizes]:
    shapes: dict[str, Sizes] = {}
    for graph in all_graphs(model.graph):
        values = (*graph.value_info, *graph.input, *graph.output)
        shapes |= {v.name: sizes_of(v) for v in values if v.type.tensor_type.HasField("shape")}
        shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    return shapes


def sizes_of(value: onnx.ValueInfoProto) -> Sizes:
    """Return the shape of a tensor, dynamic dimensions by their expression."""
    dimensions = value.type.tensor_type.shape.dim
    return tuple(d.dim_param or (d.dim_value if d.HasField("dim_value") else UNKNOWN) for d in dimensions)


def unjudged(model: onnx.ModelProto, shapes: Mapping[str, Sizes]) -> str:
    """Say which tensors of a graph nobody can judge before the file runs; "" where there are none.

    Their number of dimensions is not known, or a dimension is neither a number nor an expression of the inputs' axes:
    it depends on the numbers that the model computes.

    Args:
        model: the graph.
        shapes: what `all_shapes` returns of it.
    """
    axes = {size for value in model.graph.input for size in sizes_of(value) if isinstance(size, str)} - {UNKNOWN}
    found = [name for name in _made(model) if name not in shapes]
    found += [name for name, shape in shapes.items() if any(_is_unknown(size, axes) for size in shape)]
    if not found:
        return ""
    return f"the size of {len(found)} tensor(s) is not known before the file runs: {', '.join(found[:3])}"


def _is_unknown(size: int | str, axes: Collection[str]) -> bool:
    """Return whether a dimension is neither a number nor an expression of these axes."""
    if isinstance(size, int):
        return False
    return size == UNKNOWN or (size not in axes and not set(_SYMBOL.findall(size)) <= set(axes))
