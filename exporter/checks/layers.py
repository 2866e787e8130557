"""Check every replaced layer of a user's module: its window holds, and its memory is linear in the length.

Nothing is known about which tokens the rest of the user's module may see. Each different attention node is run alone;
if its length is dynamic, at a length that its window does not cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import onnx

from ...core.documents.sidecar import CheckRecord
from ...onnx_graph.graph_values import all_graphs
from .outcome import failed, not_proven, passed, skipped
from .probe import NodeProbe, probes
from .quadratic_memory import Shape, Taken, still_square, taken_sizes
from .window import Findings, check_node_window

# Twice the length takes twice the memory, and a little more for padding; four times would be quadratic.
_LINEAR = 3.0


def check_layer_windows(model: onnx.ModelProto, absent: Sequence[str]) -> CheckRecord:
    """Check the window of every different attention node.

    Args:
        model: the written file, weights may be absent.
        absent: layers that were replaced and left no node in the file.
    """
    different = probes(model)
    if not different:
        return skipped("no layer was replaced by windowed attention")
    findings, small = Findings(), []
    for probe in different:
        one = Findings()
        check_node_window(_at_some_length(probe), one)
        findings.boundaries += one.boundaries
        findings.faults += one.faults
        if not ((one.back and one.ahead) or probe.geometry.sees_all):
            small.append(f"{probe.node.name} has {probe.length} tokens, which one window covers")
    figures: dict[str, float | int | str] = {"boundaries": findings.boundaries, "nodes": len(different)}
    if findings.faults:
        return failed("; ".join(findings.faults[:3]), **figures)
    if absent:
        why = "called, but not in the file; the result is unused, or a closure holds the layer"
        return not_proven(f"{', '.join(absent)}: {why}", **figures)
    if small:
        return not_proven("; ".join(small[:3]), **figures)
    return passed(f"{findings.boundaries} boundaries hold, {len(different)} different node(s)", **figures)


def check_layer_memory(
    model: onnx.ModelProto,
    lengths: set[int],
    dynamic_axis: str,
    retrace: Callable[[Taken], tuple[set[int], dict[str, Shape]] | None],
) -> CheckRecord:
    """Check that no attention node and no other tensor takes memory quadratic in the sequence length.

    Args:
        model: the written file, weights may be absent.
        lengths: lengths of the sequences, if they are static.
        dynamic_axis: name of the sequence axis if it is dynamic, else "".
        retrace: traces the module so that every layer sees other lengths; returns those lengths and the shapes by
            name, or None if the module accepts no other lengths.
    """
    different = {repr((p.node.op_type, sorted(p.attributes.items()))): p for p in probes(model)}
    suspects = [fault for probe in different.values() for fault in _superlinear(probe)]
    if suspects:
        return failed(f"not linear in the length: {', '.join(suspects[:5])}")
    shapes = _shapes(model)
    square = {name: shape for name, shape in shapes.items() if _is_square(shape, lengths, dynamic_axis)}
    faults = list(square)
    if square and not dynamic_axis:
        taken = taken_sizes(shapes, square)
        elsewhere = retrace(taken)
        if elsewhere is not None:
            faults = still_square(square, taken, *elsewhere)
        else:
            faults = _scores(model, square, shapes, lengths)
            if not faults:
                detail = f"{', '.join([*square][:5])} may be square in the length, or as wide by chance"
                return not_proven(detail)
    if faults:
        detail = f"{len(faults)} tensors outside the replaced layers are square in the length: {', '.join(faults[:5])}"
        return failed(detail)
    detail = f"{len(different)} different node(s) take memory linear in the length, and no other tensor is square in it"
    return passed(detail, tensors=len(shapes))


def _at_some_length(probe: NodeProbe) -> NodeProbe:
    """Return the probe; if its length is dynamic, at a length that its window does not cover."""
    geometry, block = probe.geometry, int(probe.attributes["query_block"])
    some = 2 * block if geometry.sees_all else geometry.keys_per_window + 2 * geometry.window_size
    return probe if probe.length else replace(probe, length=some + 1)


def _superlinear(probe: NodeProbe) -> list[str]:
    """List the tensors of a node that grow faster than its length, by the shapes that onnxruntime computed.

    An ONNX function for one length, in which every block takes the whole sequence or the blocks are computed in
    parts, is measured at that length: no tensor may be much larger than the number of queries times the keys that a
    block reaches, with an allowance for padding.
    """
    block, geometry = int(probe.attributes["query_block"]), probe.geometry
    if geometry.sees_all:
        return _grown(probe, block)
    reached = geometry.backward_reach + geometry.forward_reach + block
    if probe.length > 0 and (probe.length <= reached or probe.for_one_length):
        # Scores take one number per query and key, gathered keys one per channel; the probe has at most 16 channels.
        most = _LINEAR * max(probe.length, block) * reached * max(1, 16 // block)
        return [
            f"{probe.node.name}: {name}" for name, shape in probe.measured_shapes().items() if math.prod(shape) > most
        ]
    return _grown(probe, -(-geometry.keys_per_window // block) * block)  # an ONNX function may rely on whole blocks


def _grown(probe: NodeProbe, span: int) -> list[str]:
    """List the tensors that are much more than twice as large at twice the length, of 4 and 8 `span`."""
    once, twice = (replace(probe, length=n * span).measured_shapes() for n in (4, 8))
    return [
        f"{probe.node.name}: {name}"
        for name, shape in once.items()
        if math.prod(twice.get(name, ())) > _LINEAR * max(math.prod(shape), 1)
    ]


def _shapes(model: onnx.ModelProto) -> dict[str, tuple[int | str, ...]]:
    """Return the shapes of all tensors of a model and its subgraphs, dynamic dimensions by their expression."""
    shapes: dict[str, tuple[int | str, ...]] = {}
    for graph in all_graphs(model.graph):
        values = (*graph.value_info, *graph.input, *graph.output)
        shapes |= {v.name: tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}
        shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    return shapes


def _scores(
    model: onnx.ModelProto, suspects: Collection[str], shapes: Mapping[str, tuple[int | str, ...]], lengths: set[int]
) -> list[str]:
    """List the suspects that are a product of two activations over another axis, as attention scores are.

    At a single length an axis of positions and an axis of as many channels look the same. In such a product both
    remaining axes count positions.
    """
    fed, found = {value.name for value in model.graph.input}, []
    for node in model.graph.node:
        if not fed.isdisjoint(node.input):
            fed |= set(node.output)
        if node.op_type == "MatMul" and fed.issuperset(node.input) and node.output[0] in suspects:
            inner = shapes.get(node.input[0], ())[-1:]
            found += [node.output[0]] if inner and inner[0] not in lengths else []
    return found


def _is_square(shape: tuple[int | str, ...], lengths: set[int], dynamic_axis: str) -> bool:
    if dynamic_axis:
        # `Min(32, seq)` does not grow with the sequence, because it is bounded by its number.
        growing = [size for size in shape if isinstance(size, str) and dynamic_axis in size]
        return sum(not size.startswith("Min(") for size in growing) >= 2
    sizes = [size for size in shape if isinstance(size, int)]
    return sum(size in lengths for size in sizes) >= 2 and math.prod(sizes) > 1
