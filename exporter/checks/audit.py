"""Check: no tensor of the graph has two dimensions of the sequence length.

The graph's own tensors are judged by their recorded shapes, those inside the attention node's body by the
shapes onnxruntime really computed. A model may be as wide as the sequence is long: then the graph is
traced at another length, and only what grew in both dimensions is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx

from ...core.sidecar import CheckRecord
from ..source import SourceModel
from .probe import probes

_NAME = "memory audit"
Shape = tuple[int, ...]


def check_audit(model: onnx.ModelProto, source: SourceModel, retrace: Callable[[int], dict[str, Shape]]) -> CheckRecord:
    """Look for tensors that are quadratic in the sequence length.

    Args:
        model: the written file, weights may be absent.
        source: what it was exported from.
        retrace: traces the model at a length unlike the one given; that length, and the shapes by name.
    """
    length, window = source.shapes.seq_len, source.geometry.window_size
    if length <= window:
        return CheckRecord(
            name=_NAME,
            status="not proven",
            detail=f"length {length} fits in one window of {window}: scores of one window are all there is",
        )
    shapes, alone = graph_shapes(model), probes(model)
    lengths = {length} | {probe.length for probe in alone}  # a node's input may be padded
    suspects = [name for name, shape in shapes.items() if _is_square(shape, lengths)]
    if suspects:
        suspects = _grown(suspects, length, retrace)
    largest = max((_elements(shape) for shape in shapes.values()), default=0)
    for probe in alone:
        inside = probe.measured_shapes()
        suspects += [f"{probe.node.name}: {name}" for name, shape in inside.items() if _is_square(shape, lengths)]
        heads = source.shapes.batch * source.shapes.heads
        largest = max(largest, heads * max(_elements(shape) for shape in inside.values()))
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


def graph_shapes(model: onnx.ModelProto) -> dict[str, Shape]:
    """Shapes of all tensors of a graph but its initializers that are weights, by name."""
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}
    return shapes | {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}


def _is_square(shape: Iterable[int], lengths: set[int]) -> bool:
    return sum(size in lengths for size in shape) >= 2


def _elements(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _grown(suspects: list[str], length: int, retrace: Callable[[int], tuple[int, dict[str, Shape]]]) -> list[str]:
    """Those of the suspects that are square at another length too."""
    other, elsewhere = retrace(length)
    return [name for name in suspects if name not in elsewhere or sum(n == other for n in elsewhere[name]) >= 2]
