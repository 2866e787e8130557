"""Check every replaced layer of a user's module: its window holds, and its memory is linear in the length.

Nothing is known about which tokens the rest of the user's module may see. Each different attention node is run alone;
if its length is dynamic, at a length that its window does not cover.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import onnx

from ...core.documents.sidecar import CheckRecord
from .growth import Growth, all_shapes, per_position, sizes_of, square_in, unjudged
from .outcome import failed, not_proven, passed
from .probe import NodeProbe, probes
from .quadratic_memory import Shape, SizesInUse, sizes_in_use, still_square
from .window import Findings, check_node_window, edges_hold

# Twice the length needs twice the memory, and a little more for padding; quadratic memory would be four times as much.
_LINEAR = 3.0


def check_layer_windows(model: onnx.ModelProto, absent: Sequence[str]) -> CheckRecord:
    """Check the window of every different attention node.

    Args:
        model: the written file, weights may be absent.
        absent: layers that were replaced and left no node in the file.
    """
    different = probes(model)
    if not different:
        return not_proven("the file has no windowed attention, so there was no window to check")
    findings, small = Findings(), []
    for probe in different:
        one = Findings()
        check_node_window(_at_some_length(probe), one)
        findings.boundaries += one.boundaries
        findings.faults += one.faults
        if not ((one.back and one.ahead) or probe.geometry.sees_all):
            small.append(f"{probe.node.name} has {probe.length} tokens, which fit in one window")
    figures: dict[str, float | int | str] = {"boundaries": findings.boundaries, "nodes": len(different)}
    if findings.faults:
        return failed("; ".join(findings.faults[:3]), **figures)
    if absent:
        why = "called, but not in the file: its result is unused, or a closure holds the layer"
        return not_proven(f"{', '.join(absent)}: {why}", **figures)
    if small:
        return not_proven("; ".join(small[:3]), **figures)
    if all(probe.geometry.sees_all for probe in different):
        edges = f"{findings.boundaries} edges of full attention are correct ({len(different)} distinct node(s))"
        return not_proven(f"no layer has a window; {edges}", **figures)
    return passed(edges_hold(findings.boundaries, len(different)), **figures)


def check_layer_memory(
    model: onnx.ModelProto,
    lengths: set[int],
    dynamic_axes: Collection[str],
    retrace: Callable[[SizesInUse], tuple[set[int], dict[str, Shape]] | None],
) -> CheckRecord:
    """Check that no attention node and no other tensor needs memory quadratic in the sequence length.

    Args:
        model: the written file, weights may be absent.
        lengths: lengths of the sequences, if they are static; empty where they are not known.
        dynamic_axes: names of the dynamic axes that may be the sequence; empty where it is static.
        retrace: traces the module so that every layer sees other lengths; returns those lengths and the shapes by
            name, or None if the module accepts no other lengths.
    """
    different = {repr((p.node.op_type, sorted(p.attributes.items()))): p for p in probes(model)}
    suspects = [fault for probe in different.values() for fault in _superlinear(probe)]
    if suspects:
        return failed(f"not linear in the length: {', '.join(suspects[:5])}")
    shapes = all_shapes(model)
    if dynamic_axes:
        return _dynamic_memory(shapes, dynamic_axes, len(different), unjudged(model, shapes))
    square = {name: shape for name, shape in shapes.items() if _is_square(shape, lengths)}
    faults: list[str] = []
    if square:
        in_use = sizes_in_use(shapes, square)
        elsewhere = retrace(in_use)
        if elsewhere is not None:
            faults = still_square(square, in_use, *elsewhere)
        else:
            faults = _scores(model, square, shapes, lengths)
            if not faults:
                detail = f"{', '.join([*square][:5])} may be n × n, or have two equal sizes by chance"
                return not_proven(detail)
    if faults:
        return failed(_square(faults))
    if not lengths:
        return not_proven(f"which size is the sequence length is not known; {_nodes(len(different))}")
    why = unjudged(model, shapes)
    if why:
        return not_proven(why)
    sizes = ", ".join(map(str, sorted(lengths)[:5]))
    return passed(f"no n × n tensor (n = {sizes}); {_nodes(len(different))}", tensors=len(shapes))


def _dynamic_memory(
    shapes: Mapping[str, tuple[int | str, ...]], axes: Collection[str], different: int, unknown: str
) -> CheckRecord:
    """Look for tensors with two dimensions that grow with one of the axes, by the expressions of their dimensions.

    Args:
        shapes: of all tensors.
        axes: that may count positions.
        different: number of distinct attention nodes.
        unknown: what cannot be judged, as `unjudged` says it.
    """
    growing = {name: [size for size in shape if _grows(size, axes)] for name, shape in shapes.items()}
    faults = [name for name, sizes in growing.items() if any(_degree(sizes, axis) > 1 for axis in axes)]
    if faults:
        return failed(_square(faults))
    if not any(growing.values()):
        return not_proven(f"no tensor has the dynamic axis {', '.join(axes)}, so nothing was measured")
    if unknown:
        return not_proven(unknown)
    named = ", ".join(f"n = {axis}" for axis in axes)
    return passed(f"no n × n tensor ({named}); {_nodes(different)}", tensors=len(shapes))


def _grows(size: int | str, axes: Collection[str]) -> bool:
    """Return whether a dimension grows with one of the axes; `Min(32, seq)` does not, as its number bounds it."""
    if not isinstance(size, str) or size.startswith("Min("):
        return False
    return any(re.search(rf"(?<!\w){re.escape(axis)}(?!\w)", size) for axis in axes)


def _degree(sizes: Iterable[int | str], axis: str) -> int:
    """Return how many dimensions grow with an axis; one that holds its square counts twice."""
    name = rf"(?<!\w){re.escape(axis)}(?!\w)"
    squared = re.compile(rf"{name}\s*\*\*|{name}\s*\*\s*{name}")
    return sum(2 if squared.search(str(size)) else 1 for size in sizes if _grows(size, [axis]))


def _square(faults: Sequence[str]) -> str:
    return f"{len(faults)} tensor(s) outside the windowed layers are n × n: {', '.join(faults[:5])}"


def _nodes(different: int) -> str:
    if not different:
        return "there are no windowed attention nodes"
    return f"memory of the attention nodes is linear in the length ({different} distinct)"


def check_growth(
    model: onnx.ModelProto, lengths: Collection[int], found: CheckRecord, growths: Iterable[Growth | str]
) -> CheckRecord:
    """Measure how the tensors of a file with static sizes grow with each axis of its inputs.

    Args:
        model: the written file, weights may be absent.
        lengths: of the sequences; empty where they are not known.
        found: what `check_layer_memory` found at these lengths.
        growths: for each axis the shapes at another size; its name where the module takes one size only.
    """
    shapes = all_shapes(model)
    sequences, fixed = list[Growth](), list[str]()
    for growth in growths:
        if isinstance(growth, str):
            fixed.append(growth)
            continue
        # The first axis of an input may count sequences; if lengths are known, other axes are not lengths.
        if growth.size not in lengths if lengths else growth.axis.startswith("axis 0 "):
            continue
        sequences.append(growth)
        faults = square_in(growth, model)
        if faults:
            return failed(f"{_square(faults)} (n = {growth.size}, {growth.axis})")
    if sequences:
        most = max(per_position(growth, model) for growth in sequences)
        sizes = ", ".join(f"{growth.size} → {growth.other} for {growth.axis}" for growth in sequences)
        why = unjudged(model, shapes)
        if why:
            return not_proven(why)
        detail = f"no n × n tensor, measured with n = {sizes}; at most {most:,} elements a position"
        return passed(detail, tensors=len(shapes))
    if lengths:
        return found
    given = {x for value in model.graph.input for x in sizes_of(value) if isinstance(x, int) and x > 1}
    square = [name for name, shape in shapes.items() if _is_square(shape, given)]
    scores = _scores(model, square, shapes, given)
    if scores:
        return failed(_square(scores))
    why = f"the module accepts {', '.join(fixed) or 'its inputs'} at one size only, so growth cannot be measured"
    return not_proven(f"{why}; {len(square)} tensor(s) may be n × n" if square else why)


def _at_some_length(probe: NodeProbe) -> NodeProbe:
    """Return the probe; if its length is dynamic, at a length larger than its window."""
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


def _scores(
    model: onnx.ModelProto,
    suspects: Collection[str],
    shapes: Mapping[str, tuple[int | str, ...]],
    lengths: Collection[int],
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


def _is_square(shape: tuple[int | str, ...], lengths: Collection[int]) -> bool:
    sizes = [size for size in shape if isinstance(size, int)]
    return sum(size in lengths for size in sizes) >= 2 and math.prod(sizes) > 1
