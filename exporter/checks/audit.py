"""Check: no tensor of the graph has two dimensions of the sequence length.

The graph's own tensors are judged by their recorded shapes, those inside the attention node's body by the
shapes onnxruntime really computed. A model may be as wide as the sequence is long: then the graph is
traced at another length, and only what grew in both dimensions is a fault.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import onnx

from ...core.sidecar import CheckRecord
from ..source import SourceModel
from .probe import probes

_NAME = "memory audit"
Shape = tuple[int, ...]
# A replaced layer keeps a module for each length it is called with (`modules/drop_in.py`).
_NUMBERED = re.compile(r"val_\d+")
_MADE_FOR = re.compile(r"(?<=\.by_length)\.\d+(?=\.)")


def check_audit(
    model: onnx.ModelProto, source: SourceModel, retrace: Callable[[set[int]], tuple[int, dict[str, Shape]]]
) -> CheckRecord:
    """Look for tensors that are quadratic in the sequence length.

    Args:
        model: the written file, weights may be absent.
        source: what it was exported from.
        retrace: traces the model at another length, unlike these sizes if it can; that length, and the shapes by name.
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
        other, elsewhere = retrace({size for shape in square.values() for size in shape})
        suspects = grown(square, {other}, elsewhere)
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


def grown(suspects: Mapping[str, tuple[int | str, ...]], others: set[int], elsewhere: Mapping[str, Shape]) -> list[str]:
    """Those of the suspects that are square at other lengths too.

    A name that the exporter numbered may be another tensor's there. Of such tensors as many are no fault as have the
    same shape there: the length did not change it.

    Args:
        suspects: shapes of the tensors that may be square in the length, by name.
        others: the other lengths.
        elsewhere: the shapes at those, by name.
    """
    found: dict[str, list[Shape]] = {}
    for name, other in elsewhere.items():
        found.setdefault(_MADE_FOR.sub("", name), []).append(other)
    same: Counter[tuple[int | str, ...]] = Counter(x for name, x in elsewhere.items() if _NUMBERED.fullmatch(name))
    faults = []
    for name, shape in suspects.items():
        if _NUMBERED.fullmatch(name):
            same[shape] -= 1
            if same[shape] < 0:
                faults.append(name)
        else:
            there = found.get(_MADE_FOR.sub("", name), [])
            if not there or any(is_square(x, others) for x in there):
                faults.append(name)
    return faults
