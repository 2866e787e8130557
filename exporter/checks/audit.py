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
        retrace: the graph's shapes by name, traced at another length.
    """
    length, window = source.shapes.seq_len, source.geometry.window_size
    lengths = {length, length + (-length) % window}
    if length <= window:
        return CheckRecord(
            name=_NAME,
            status="not proven",
            detail=f"length {length} fits in one window of {window}: scores of one window are all there is",
        )
    shapes = graph_shapes(model)
    suspects = [name for name, shape in shapes.items() if _is_square(shape, lengths)]
    if suspects:
        suspects = _grown(suspects, source, retrace)
    largest = max((_elements(shape) for shape in shapes.values()), default=0)
    for probe in probes(model):
        inside = probe.measured_shapes()
        own = lengths | {probe.length}
        suspects += [f"{probe.node.name}: {name}" for name, shape in inside.items() if _is_square(shape, own)]
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


def _grown(suspects: list[str], source: SourceModel, retrace: Callable[[int], dict[str, Shape]]) -> list[str]:
    """Those of the suspects that are square at another length too."""
    step = source.geometry.window_size
    other = source.shapes.seq_len - step  # shorter, so that no max_seq_len forbids it; a whole window less
    elsewhere = retrace(other)
    lengths = {other, other + (-other) % step}
    return [name for name in suspects if name not in elsewhere or _is_square(elsewhere[name], lengths)]
