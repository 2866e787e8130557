"""Pass: compute a model of bf16 or fp16 in fp32, rounded where the file rounds.

onnxruntime's CPU provider moves and casts bf16 and computes nothing in it. On x86-64 it computes nothing in fp16
either: it casts to fp32, and leaves out the roundings between two operators, so that what is beyond fp16's largest
number on a GPU is a number like any other. In the copy made here each value that is bf16 or fp16 in the file is fp32
and holds a number of the file's type: operators compute in fp32, and two Casts round their results, to nearest even. A
product of such matrices is thus summed in fp32 and rounded once, which is what tensor cores do. Operators that only
move or choose numbers need no rounding. What the file's functions compute in fp32 stays in fp32.

A kernel that the caller has, such as one of localattn's compiled ones, computes its whole node in fp32 and rounds once.

Inputs and outputs that are bf16 in the file are float32 in the copy, since numpy has no bf16; inputs are rounded. Those
that are fp16 stay so. Weights stay as they are, in the file of external data too, with a Cast behind each that the
engine folds when it loads.

With `watch` the copy has one output more, `PEAKS`: the largest magnitude of every value before it is rounded, in the
order in which the graph computes them. It also has one input more, `LIMIT`: values from there on are not rounded. With
`NO_LIMIT` the copy computes as a GPU does, and with `FP16_ROUNDS_UP` likewise, but keeps what does not fit into fp16:
where the outputs of both are the same, the infinities of the first do not matter. It is one copy, so that everything
else is computed by the same kernels in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import inlining
from ..graph_values import all_graphs, element_types, put_back, rename_inputs, set_nodes, take_weights, types_of
from ..judgement import graphs_of
from ..library_errors import infer_shapes

# Results of these operators are inputs or their negatives, so they are exact in any element type. Results of control
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
# The output and the input of a watched copy, and the key under which nodes name the module that they come from.
PEAKS, LIMIT, MODULE = "localattn.peaks", "localattn.limit", "module"
# From here on, halfway between fp16's largest number, 65,504, and the next power of two, rounding gives infinity.
FP16_ROUNDS_UP, NO_LIMIT = 65520.0, math.inf


class Watched(NamedTuple):
    """A copy of a model that also returns the largest magnitude of each value that it rounds.

    Args:
        model: the copy.
        values: what `PEAKS` counts, in its order: the value's name in the model, and the module that computes it, ""
            where the file does not say.
    """

    model: Any
    values: list[tuple[str, str]]


def apply(
    model: Any, has_kernel: Callable[[str, str], bool] = inlining.no_calls, dtypes: Sequence[str] = ("bf16",)
) -> Any:
    """Return the model in fp32 and without functions, or the model itself if nothing in it is of these types.

    Functions are inlined (see `inlining`). External data is not read: the copy refers to it as the model does.

    Args:
        model: the model.
        has_kernel: whether the engine has a kernel in fp32 for nodes of this domain and op type. They stay as they are.
        dtypes: the types to compute in fp32, of "bf16" and "fp16".
    """
    return _rewritten(model, has_kernel, dtypes, watches=False).model


def watch(model: Any, has_kernel: Callable[[str, str], bool] = inlining.no_calls) -> Watched:
    """Return a copy of an fp16 model that also returns how large the values are that it rounds to fp16.

    Values inside of Scan, Loop and If are rounded, and not watched: their results are.

    Args:
        model: the model.
        has_kernel: as of `apply`.
    """
    return _rewritten(model, has_kernel, ("fp16",), watches=True)


def has_fp16(model: Any) -> bool:
    """Return whether a model computes in fp16: it has inputs or weights of that type, or casts to it."""
    import onnx

    fp16 = onnx.TensorProto.FLOAT16
    nodes = (node for part in (*all_graphs(model.graph), *model.functions) for node in part.node)
    return "float16" in element_types(model) or any(
        (attribute.name in ("to", "dtype", "output_dtype") and attribute.i == fp16) or attribute.t.data_type == fp16
        for node in nodes
        for attribute in node.attribute
    )


def _rewritten(
    model: Any,
    has_kernel: Callable[[str, str], bool],
    dtypes: Sequence[str],
    *,
    watches: bool,
) -> Watched:
    import onnx

    known = {"bf16": onnx.TensorProto.BFLOAT16, "fp16": onnx.TensorProto.FLOAT16}
    kinds = {known[dtype] for dtype in dtypes}
    weights = take_weights(model)
    modules = _modules_of_calls(model)
    typed = infer_shapes(inlining.apply(model, has_kernel))
    types = dict(types_of(typed.graph))
    if kinds.isdisjoint(types.values()):
        put_back(model, weights)
        return Watched(model, [])
    put_back(typed, weights)
    narrow = {name: kind for name, kind in types.items() if kind in kinds}
    rewrite = _Rewrite(narrow, types, watches=watches)
    rewrite.top(typed.graph)
    values = _add_peaks(typed.graph, rewrite.roundings, _modules(typed.graph, modules)) if watches else []
    del typed.functions[:]  # of the nodes that have kernels: their bodies are bf16, and only named the types
    return Watched(typed, values)


def _module(node: Any) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == MODULE), "")


def _modules_of_calls(model: Any) -> dict[str, str]:
    """Return the modules of the nodes that call functions, by the names of their outputs."""
    functions = {(function.domain, function.name) for function in model.functions}
    calls = (node for node in model.graph.node if (node.domain, node.op_type) in functions)
    return {name: _module(node) for node in calls for name in node.output}


def _modules(graph: Any, calls: dict[str, str]) -> dict[str, str]:
    """Return the module of each value; nodes of an inlined function lie before the one that gives its result."""
    found, current = {}, ""
    for node in reversed(graph.node):
        current = next((calls[name] for name in node.output if name in calls), current)
        found.update(dict.fromkeys(node.output, _module(node) or current))
    return found


def _add_peaks(graph: Any, roundings: Sequence[_Rounding], modules: dict[str, str]) -> list[tuple[str, str]]:
    """Add the input `LIMIT` and the output `PEAKS`; return name and module of the values it counts."""
    import onnx

    graph.input.append(onnx.helper.make_tensor_value_info(LIMIT, onnx.TensorProto.FLOAT, []))
    made = {name for node in graph.node for name in node.output}
    counted = [rounding for rounding in roundings if rounding.source in made]
    if not counted:
        return []
    one = "localattn.one"
    graph.initializer.append(onnx.helper.make_tensor(one, onnx.TensorProto.INT64, [1], [1]))
    peaks = []
    for place, rounding in enumerate(counted):
        largest, row = (f"{PEAKS}.{part}.{place}" for part in ("largest", "row"))
        graph.node.append(onnx.helper.make_node("ReduceMax", [rounding.size], [largest], name=largest, keepdims=0))
        graph.node.append(onnx.helper.make_node("Reshape", [largest, one], [row], name=row))
        peaks.append(row)
    graph.node.append(onnx.helper.make_node("Concat", peaks, [PEAKS], name=PEAKS, axis=0))
    graph.output.append(onnx.helper.make_tensor_value_info(PEAKS, onnx.TensorProto.FLOAT, [len(peaks)]))
    return [(one.target, modules.get(one.source) or modules.get(one.target, "")) for one in counted]


def _is_exact(node: Any) -> bool:
    adds = any(attribute.name == "reduction" and attribute.s != b"none" for attribute in node.attribute)
    return node.domain in ("", "ai.onnx") and node.op_type in EXACT and not adds


class _Rounding(NamedTuple):
    """A value of a watched copy before it is rounded, the file's own, and the name of its magnitude."""

    source: str
    target: str
    size: str


class _Rewrite:
    """Rewriter of a graph, in place.

    Args:
        kinds: element type of each value that is computed in fp32.
        types: element type of all values.
        watches: whether `LIMIT` says what is rounded.

    Attributes:
        roundings: those of the outermost graph, where it is watched.
    """

    def __init__(self, kinds: dict[str, int], types: dict[str, int], *, watches: bool) -> None:
        import onnx

        self._fp16, self._fp32 = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
        self._make = onnx.helper.make_node
        self._kinds, self._narrow, self._types, self._used = kinds, set(kinds.values()), types, set(types)
        self._depth, self._watches = 0, watches
        self.roundings: list[_Rounding] = []

    def top(self, graph: Any) -> None:
        """Rewrite the graph of a model; its bf16 inputs become float32 and are rounded, its fp16 ones stay."""
        given = [value.name for value in graph.input if value.name in self._kinds]
        results = [value.name for value in graph.output if value.name in self._kinds]
        halves = {name for name in (*given, *results) if self._kinds[name] == self._fp16}
        wide = {name: self._new(name, "rounded") for name in given}
        self.graph(graph)
        for node in graph.node:
            rename_inputs(node, wide)
        before = [self._cast(name, wide[name], self._fp32) for name in given if name in halves]
        before += [node for name in given if name not in halves for node in self._round(name, wide[name])]
        made = {name for node in graph.node for name in node.output} | {x.name for x in graph.initializer}
        narrow = {name: self._new(name, "wide") for name in results if name in halves and name in made}
        for node in graph.node:
            node.output[:] = [narrow.get(name, name) for name in node.output]
            rename_inputs(node, narrow)
        for tensor in graph.initializer:
            tensor.name = narrow.get(tensor.name, tensor.name)
        after = [self._cast(source, name, self._fp16) for name, source in narrow.items()]
        set_nodes(graph, [*before, *graph.node, *after])
        for value in (*graph.input, *graph.output):
            if value.name in halves:
                value.type.tensor_type.elem_type = self._fp16
        self.roundings = [
            one._replace(source=narrow.get(one.source, one.source)) for one in self.roundings if one.source not in given
        ]

    def graph(self, graph: Any) -> None:
        """Rewrite a graph whose inputs already have the precision of the file's types."""
        self._depth += 1
        nodes = [new for node in graph.node for new in self._node(node)]
        loads = []
        for tensor in graph.initializer:
            if tensor.name in self._kinds:
                stored = self._new(tensor.name, "stored")
                loads.append(self._cast(stored, tensor.name, self._fp32))
                tensor.name = stored
        set_nodes(graph, [*loads, *nodes])
        for value in (*graph.value_info, *graph.input, *graph.output):
            if value.type.tensor_type.elem_type in self._narrow:
                value.type.tensor_type.elem_type = self._fp32
        self._depth -= 1

    def _node(self, node: Any) -> list[Any]:
        """Return the node, and the nodes that round its results."""
        for inner in graphs_of(node):
            self.graph(inner)
        results = [name for name in node.output if name in self._kinds]
        if not results or _is_exact(node):
            return [node]
        if node.op_type in _CASTS:
            source = node.input[0]
            if source in self._kinds or self._types.get(source) == self._fp32:
                return list(self._round(source, results[0]))
            wide = self._new(results[0], "exact")  # of integers, booleans and doubles
            return [self._cast(source, wide, self._fp32), *self._round(wide, results[0])]
        if not any(name in self._kinds for name in node.input):  # a Constant, a random number: narrow by an attribute
            stored = {name: self._new(name, "narrow") for name in results}
            node.output[:] = [stored.get(name, name) for name in node.output]
            return [node, *(self._cast(narrow, name, self._fp32) for name, narrow in stored.items())]
        for attribute in node.attribute:
            if attribute.name == "output_dtype" and attribute.i in self._narrow:
                attribute.i = self._fp32
        exact = {name: self._new(name, "exact") for name in results}
        node.output[:] = [exact.get(name, name) for name in node.output]
        return [node, *(cast for name, wide in exact.items() for cast in self._round(wide, name))]

    def _round(self, source: str, target: str) -> Iterator[Any]:
        narrow = self._new(target, "narrow")
        yield self._cast(source, narrow, self._kinds.get(target) or self._kinds[source])
        if not self._watches:
            yield self._cast(narrow, target, self._fp32)
            return
        rounded, size, fits = (self._new(target, kind) for kind in ("finite", "size", "fits"))
        yield self._cast(narrow, rounded, self._fp32)
        yield self._make("Abs", [source], [size], name=size)
        yield self._make("Less", [size, LIMIT], [fits], name=fits)
        yield self._make("Where", [fits, rounded, source], [target], name=self._new(target, "Where"))
        if self._depth == 1:
            self.roundings.append(_Rounding(source, target, size))

    def _cast(self, source: str, target: str, to: int) -> Any:
        return self._make("Cast", [source], [target], to=to, name=self._new(target, "Cast"))

    def _new(self, name: str, kind: str) -> str:
        """Make a name that no value has."""
        made = f"{name}/{kind}"
        while made in self._used:
            made += "_"
        self._used.add(made)
        return made
