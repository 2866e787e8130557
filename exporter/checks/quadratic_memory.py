"""Check: no tensor of the graph has two dimensions of the sequence length.

The graph's own tensors are judged by their recorded shapes, those inside the attention node's body by the
shapes onnxruntime really computed. A model may be as wide as the sequence is long: then the graph is
traced at another length, and only what grew in both dimensions is a fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import onnx

from ...core.documents.sidecar import CheckRecord
from ..source.source_model import SourceModel
from .probe import probes

_NAME = "memory audit"
Shape = tuple[int, ...]
# Sizes that another length should not be, lest a tensor have them by chance: of a whole graph, of its suspects.
Taken = tuple[frozenset[int], frozenset[int]]
T = TypeVar("T")
# A replaced layer keeps a module for each length it is called with (`exporter/models/local_attention/adapter.py`).
_MADE_FOR = re.compile(r"(?<=\.by_length)\.\d+(?=\.)")


def check_quadratic_memory(
    model: onnx.ModelProto, source: SourceModel, retrace: Callable[[Taken], tuple[set[int], dict[str, Shape]]]
) -> CheckRecord:
    """Look for tensors that are quadratic in the sequence length.

    Args:
        model: the written file, weights may be absent.
        source: what it was exported from.
        retrace: traces the model at another length; that length, also as it is padded, and the shapes by name.
    """
    length, window = source.shapes.seq_len, source.window_size
    if source.shapes.full_mask:
        return CheckRecord(name=_NAME, status="skipped", detail=f"a mask {length} × {length} was asked for")
    if length <= window:
        return CheckRecord(
            name=_NAME,
            status="not proven",
            detail=f"length {length} fits in one window of {window}: scores of one window are all there is",
        )
    shapes, alone = graph_shapes(model), probes(model)
    lengths = {length} | {probe.length for probe in alone}  # a node's input may be padded
    square = {name: shape for name, shape in shapes.items() if is_square(shape, lengths)}
    suspects: list[str] = []
    if square:
        taken = taken_sizes(shapes, square)
        suspects = still_square(square, taken, *retrace(taken))
    largest = max((elements(shape) for shape in shapes.values()), default=0)
    for probe in alone:
        inside = probe.measured_shapes(lengths)
        suspects += [f"{probe.node.name}: {name}" for name, shape in inside.items() if is_square(shape, lengths)]
        heads = source.shapes.batch * source.shapes.heads
        largest = max(largest, heads * max(elements(shape) for shape in inside.values()))
    if suspects:
        return CheckRecord(
            name=_NAME,
            status="failed",
            detail=f"{len(suspects)} tensors are {length} × {length}: {', '.join(suspects[:5])}",
        )
    return CheckRecord(
        name=_NAME,
        status="passed",
        detail=f"no tensor is {length} × {length}; the largest has {largest / length:.4g} elements per position",
        figures={"largest_elements": largest, "tensors": len(shapes)},
    )


def allowed(audit: CheckRecord) -> CheckRecord:
    """The record of an audit whose fault, if it found one, the user accepts."""
    if audit.status != "failed":
        return audit
    return audit.model_copy(update={"status": "skipped", "detail": f"allowed: {audit.detail}"})


def graph_shapes(model: onnx.ModelProto) -> dict[str, Shape]:
    """Shapes of all tensors of a model, those of its subgraphs included, by name."""
    shapes: dict[str, Shape] = {}
    for graph in _graphs(model.graph):
        values = (*graph.value_info, *graph.input, *graph.output)
        shapes |= {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}
        shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    return shapes


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and those inside its nodes (the bodies of Scan)."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def is_square(shape: Iterable[int], lengths: set[int]) -> bool:
    """Whether two dimensions have one of these sizes."""
    return sum(size in lengths for size in shape) >= 2


def elements(shape: Shape) -> int:
    """How many numbers a tensor holds."""
    return math.prod(shape)


def taken_sizes(shapes: Mapping[str, tuple[int | str, ...]], suspects: Iterable[str]) -> Taken:
    """All sizes of a graph, and those of the tensors that may be square in the length."""

    def sizes(names: Iterable[str]) -> frozenset[int]:
        return frozenset(size for name in names for size in shapes[name] if isinstance(size, int))

    return sizes(shapes), sizes(suspects)


def freest(lengths: Iterable[T], sizes: Callable[[T], Collection[int]], taken: Taken) -> Iterator[T]:
    """Lengths to try: those of which no size is taken in the graph, as they come; then those free of its suspects.

    Args:
        lengths: to choose from, the best first.
        sizes: the sizes that one of them brings.
        taken: as `taken_sizes` gives them.
    """
    everywhere, suspect = taken
    late = []
    for length in lengths:
        if everywhere.isdisjoint(sizes(length)):
            yield length
        else:
            late.append(length)
    yield from sorted(late, key=lambda length: not suspect.isdisjoint(sizes(length)))


def still_square(
    suspects: Mapping[str, tuple[int | str, ...]], taken: Taken, lengths: set[int], shapes: Mapping[str, Shape]
) -> list[str]:
    """Names of the tensors that are square in the length where the graph was traced at another, by their shapes there.

    The exporter numbers tensors, and another length may shift the numbers: a name alone tells little. But where that
    length is a size of something else too, a tensor must have been square by its name as well; and one whose name is
    gone must have left its shape, with the other length at one place at most.

    Args:
        suspects: shapes of the tensors that may be square, by name.
        taken: sizes of the graph, as `taken_sizes` gives them.
        lengths: the other length, also as it is padded.
        shapes: the shapes there, by name.
    """
    everywhere, _ = taken
    plain = partial(_MADE_FOR.sub, "")
    named, there, left = set(map(plain, suspects)), set(map(plain, shapes)), set(shapes.values())
    square = [name for name, shape in shapes.items() if is_square(shape, lengths)]
    faults = [name for name in square if everywhere.isdisjoint(lengths) or plain(name) in named]
    gone = {name: shape for name, shape in suspects.items() if plain(name) not in there}
    return faults + [name for name, shape in gone.items() if not _left(shape, lengths, left)]


def _left(shape: tuple[int | str, ...], lengths: set[int], shapes: set[Shape]) -> bool:
    """Whether a shape is among others as it is, or with one of these lengths in one place."""
    changed = ((*shape[:place], size, *shape[place + 1 :]) for place in range(len(shape)) for size in lengths)
    return any(other in shapes for other in (shape, *changed))
