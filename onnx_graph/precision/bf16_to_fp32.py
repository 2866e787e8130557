"""Pass: compute a bf16 model in fp32, rounded where the file rounds, for engines without bf16 kernels.

onnxruntime's CPU provider moves and casts bf16 and computes nothing in it. In the copy made here each value that
is bf16 in the file is fp32 and holds a bf16 number: operators compute in fp32, and two Casts round their
results, to nearest even. A product of bf16 matrices is thus summed in fp32 and rounded once, which is what tensor
cores do. Operators that only move or choose numbers need no rounding.

A kernel that the caller has, such as one of localattn's compiled ones, computes its whole node in fp32 and rounds once.

Inputs and outputs that are bf16 in the file are float32 in the copy, since numpy has no bf16; inputs are rounded.
Weights stay bf16, in the file of external data too, with a Cast behind each that the engine folds when it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .. import inlining
from ..graph_values import put_back, rename_inputs, set_nodes, take_weights, types_of
from ..judgement import graphs_of
from ..library_errors import infer_shapes

# Results of these operators are among their inputs, or negatives of them: exact in any element type. Results of control
# flow are those of its subgraphs, which are rounded inside.
# fmt: off
EXACT = frozenset((
    "Abs", "Compress", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements",
    "GatherND", "Identity", "If", "Loop", "Max", "MaxPool", "Min", "Neg",
    "Pad", "ReduceMax", "ReduceMin", "Relu", "Reshape", "ReverseSequence", "Scan", "ScatterElements",
    "ScatterND", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "TopK", "Transpose",
    "Trilu", "Unsqueeze", "Where",
))
# fmt: on
_CASTS = ("Cast", "CastLike")


def apply(model: Any, has_kernel: Callable[[str, str], bool] = inlining.no_calls) -> Any:
    """Return the model in fp32 and without functions, or the model itself if nothing in it is bf16.

    Functions are inlined (see `inlining`). External data is not read: the copy refers to it as the model does.

    Args:
        model: the model.
        has_kernel: whether the engine has a kernel in fp32 for nodes of this domain and op type. They stay as they are.
    """
    import onnx

    weights = take_weights(model)
    typed = infer_shapes(inlining.apply(model, has_kernel))
    types = dict(types_of(typed.graph))
    if onnx.TensorProto.BFLOAT16 not in types.values():
        put_back(model, weights)
        return model
    put_back(typed, weights)
    _Rewrite(types).top(typed.graph)
    del typed.functions[:]  # of the nodes that have kernels: their bodies are bf16, and only named the types
    return typed


def _is_exact(node: Any) -> bool:
    adds = any(attribute.name == "reduction" and attribute.s != b"none" for attribute in node.attribute)
    return node.domain in ("", "ai.onnx") and node.op_type in EXACT and not adds


class _Rewrite:
    """Rewriter of a graph, in place.

    Args:
        types: element type of each value.
    """

    def __init__(self, types: dict[str, int]) -> None:
        import onnx

        self._bf16, self._fp32 = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
        self._make = onnx.helper.make_node
        self._names = {name for name, kind in types.items() if kind == self._bf16}
        self._taken = set(types)

    def top(self, graph: Any) -> None:
        """Rewrite the graph of a model, whose bf16 inputs may hold any fp32 number."""
        given = [value.name for value in graph.input if value.name in self._names]
        rounded = {name: self._new(name, "rounded") for name in given}
        self.graph(graph)
        for node in graph.node:
            rename_inputs(node, rounded)
        rounding = [node for name in given for node in self._round(name, rounded[name])]
        set_nodes(graph, [*rounding, *graph.node])

    def graph(self, graph: Any) -> None:
        """Rewrite a graph whose inputs hold bf16 numbers already."""
        nodes = [new for node in graph.node for new in self._node(node)]
        loads = []
        for tensor in graph.initializer:
            if tensor.data_type == self._bf16:
                stored = self._new(tensor.name, "bf16")
                loads.append(self._cast(stored, tensor.name, self._fp32))
                tensor.name = stored
        set_nodes(graph, [*loads, *nodes])
        for value in (*graph.value_info, *graph.input, *graph.output):
            if value.type.tensor_type.elem_type == self._bf16:
                value.type.tensor_type.elem_type = self._fp32

    def _node(self, node: Any) -> list[Any]:
        """Return the node, and the nodes that round its results."""
        for inner in graphs_of(node):
            self.graph(inner)
        results = [name for name in node.output if name in self._names]
        if not results or _is_exact(node):
            return [node]
        if node.op_type in _CASTS:
            return list(self._round(node.input[0], results[0]))
        if not any(name in self._names for name in node.input):  # a Constant, a random number: bf16 by an attribute
            stored = {name: self._new(name, "bf16") for name in results}
            node.output[:] = [stored.get(name, name) for name in node.output]
            return [node, *(self._cast(narrow, name, self._fp32) for name, narrow in stored.items())]
        exact = {name: self._new(name, "exact") for name in results}
        node.output[:] = [exact.get(name, name) for name in node.output]
        return [node, *(cast for name, wide in exact.items() for cast in self._round(wide, name))]

    def _round(self, source: str, target: str) -> Iterator[Any]:
        narrow = self._new(target, "bf16")
        yield self._cast(source, narrow, self._bf16)
        yield self._cast(narrow, target, self._fp32)

    def _cast(self, source: str, target: str, to: int) -> Any:
        return self._make("Cast", [source], [target], to=to, name=f"{target}/Cast")

    def _new(self, name: str, kind: str) -> str:
        """Make a name that no value has."""
        made = f"{name}/{kind}"
        while made in self._taken:
            made += "_"
        self._taken.add(made)
        return made
