"""Find the values of an exported graph that are a module's input or output.

Every node of the file has the path of the module it came from. A value that is produced inside a module and used
outside it, in the shape the module returned, is its output; a value that enters it is its input. The attention node's
own inputs and output are boundaries too, because the rotary embedding comes between them and the module. A node of the
residual streams that normalizes what it reads computes the norm's output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from ...core.nodes.aft import AFT_VARIANT_BY_OP_TYPE
from ...core.nodes.attention import DOMAIN
from ...core.nodes.fused import FUSED_BY_OP_TYPE, FUSED_DOMAIN
from ...onnx_graph.fusing.streams import NORM
from ...onnx_graph.standard_ops.names import MODULE
from .reference import Floats, Recording


@dataclass(frozen=True)
class Boundary:
    """Describe a value that both the file and the PyTorch model compute.

    Args:
        value: its name in the graph.
        order: index of the node that computes it.
        path: the module's path; "" is the whole model.
        role: "output", "output from column …" where a packed matrix was cut, "input", "query", "key", "value" or
            "attention".
        expected: the float64 module's value.
    """

    value: str
    order: int
    path: str
    role: str
    expected: Floats


class GraphIndex:
    """Index a graph: which node computes and which nodes use each value, and in which module.

    Args:
        graph: the graph of a file; its nodes are in topological order.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes = list(graph.node)
        self.outputs = {value.name for value in graph.output}
        self.types = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.modules = [_path(node) for node in self.nodes]
        self.norms = dict(pair for node in self.nodes for pair in _norms(node))
        self.attention = [
            (node, path)
            for node, path in zip(self.nodes, self.modules, strict=True)
            if node.domain == DOMAIN and node.op_type not in AFT_VARIANT_BY_OP_TYPE
        ]
        self.maker: dict[str, int] = {}
        self.users: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            self.maker.update(dict.fromkeys(node.output, index))
            for name in node.input:
                self.users.setdefault(name, []).append(index)

    def shape(self, value: str) -> tuple[int, ...] | None:
        """Return the static shape of a value, or None if the file does not record it."""
        if value not in self.types:
            return None
        sizes = self.types[value].type.tensor_type.shape.dim
        return tuple(size.dim_value for size in sizes)

    def inside(self, index: int, path: str) -> bool:
        """Return whether a node came from a module or a part of it."""
        module = self.modules[index]
        return not path or module == path or module.startswith(path + ".")

    def leaving(self, path: str) -> Iterator[str]:
        """List the values made inside a module and used outside it, in order."""
        for index, node in enumerate(self.nodes):
            if not self.inside(index, path):
                continue
            for value in node.output:
                if value in self.outputs or not all(self.inside(user, path) for user in self.users.get(value, ())):
                    yield value

    def entering(self, path: str) -> Iterator[str]:
        """List the values made by nodes outside a module and used inside it, in order."""
        read = (value for index, node in enumerate(self.nodes) if self.inside(index, path) for value in node.input)
        for value in dict.fromkeys(read):
            if value in self.maker and not self.inside(self.maker[value], path):
                yield value

    def parts(self, path: str) -> Iterator[tuple[str, int]]:
        """List the values that leave a module whose matrix was cut, each with its first column of the output."""
        for value in self.leaving(path):
            queue = [value]
            while queue:
                maker = self.maker.get(queue.pop())
                if maker is None or not self.inside(maker, path):
                    continue
                node = self.nodes[maker]
                if node.op_type != "MatMul":
                    queue += node.input
                elif (start := first_column(node.input[1])) is not None:
                    yield value, start

    def behind(self, value: str, known: set[str]) -> list[str]:
        """Return the nearest of the `known` values that a value is computed from."""
        found: list[str] = []
        queue, seen = [value], {value}
        while queue:
            maker = self.maker.get(queue.pop())
            for source in () if maker is None else self.nodes[maker].input:
                if source in seen:
                    continue
                seen.add(source)
                if source in known:
                    found.append(source)
                else:
                    queue.append(source)
        return found


def find_boundaries(index: GraphIndex, recording: Recording) -> list[Boundary]:
    """Find every boundary that is unambiguous, in the order the file computes them.

    A value that is the output of one module and the input of the next is listed once, as the output.
    """
    found: dict[str, Boundary] = {}

    def add(value: str, path: str, role: str, expected: Floats) -> None:
        if value in found or value not in index.maker or index.shape(value) != expected.shape:
            return
        found[value] = Boundary(value, index.maker[value], path, role, expected)

    for value, path in index.norms.items():
        if path in recording.modules and len(recording.modules[path].outputs) == 1:
            add(value, path, "output", recording.modules[path].outputs[0])
    attention = list(zip(index.attention, recording.attention, strict=False))
    for (node, path), call in attention:
        add(node.output[0], path, "attention", call.output)
    # Inner modules first: where an inner and an outer one return the same value, the inner one made it.
    for path in sorted(recording.modules, key=lambda name: -name.count(".") if name else 1):
        outputs = recording.modules[path].outputs
        leaving = [value for value in index.leaving(path) if outputs and index.shape(value) == outputs[0].shape]
        if len(outputs) == 1 and leaving:
            add(leaving[-1], path, "output", outputs[0])
        elif len(outputs) == len(leaving):
            for value, expected in zip(leaving, outputs, strict=True):
                add(value, path, "output", expected)
        elif len(outputs) == 1:
            for value, start in index.parts(path):
                shape, before = index.shape(value) or (), outputs[0].shape[:-1]
                width = math.prod(shape[len(before) :])
                expected = outputs[0][..., start : start + width]
                if shape[: len(before)] == before and expected.shape[-1] == width:
                    add(value, path, f"output from column {start}", expected.reshape(shape))
    # After the modules' outputs: where no operation comes between, the rotary embedding's output is the query.
    for (node, path), call in attention:
        for role, value, expected in zip(
            ("query", "key", "value"), node.input, (call.query, call.key, call.value), strict=False
        ):
            add(value, path, role, expected)
    for path, module_call in recording.modules.items():
        for expected in module_call.inputs[:1]:
            entering = [value for value in index.entering(path) if index.shape(value) == expected.shape]
            # One of several equal inputs may enter in another shape: then they cannot be matched.
            alike = [given for given in module_call.inputs if given.shape == expected.shape]
            if len(entering) == len(alike) == 1 and entering[0] not in index.norms:
                add(entering[0], path, "input", expected)
    return sorted(found.values(), key=lambda boundary: boundary.order)


def first_column(weight: str) -> int | None:
    """Return at which column a matrix or bias was cut from a packed one, as `fusing.products` names it; else None."""
    packed, _, start = weight.rpartition("/")
    return int(start) if packed and start.isdecimal() else None


def _norms(node: onnx.NodeProto) -> Iterator[tuple[str, str]]:
    """Yield the values that a node read and normalized, and the path of the norm's module."""
    path = _path(node, NORM)
    contract = FUSED_BY_OP_TYPE.get(node.op_type) if node.domain == FUSED_DOMAIN else None
    for formal, name in zip(contract.outputs if path and contract else (), node.output, strict=False):
        if formal == "read":
            yield name, path


def _path(node: onnx.NodeProto, key: str = MODULE) -> str:
    return next((prop.value for prop in node.metadata_props if prop.key == key), "")
