"""Find an interval for every integer of an ONNX graph, node by node.

Runtimes compute ONNX's int64 in different widths: onnxruntime in 64 bits, OpenVINO and MNN in 32, without an error when
a number overflows. Constant values are computed by ONNX's reference implementation, node by node. Values that depend on
an input are bounded by interval arithmetic (R. E. Moore, Interval Analysis, 1966).

Ends of a Slice may be wider: an end beyond a dimension means the dimension's end (ONNX, operator Slice). Exporters
write it as the largest int64, which a 32-bit runtime reads as its own largest number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product, zip_longest
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx.shape_inference
from numpy.typing import NDArray
from onnx.external_data_helper import uses_external_data
from onnx.reference import ReferenceEvaluator

from ...core.limits import LARGEST_SIZE
from ...onnx_graph.judgement import graphs_of

Types = dict[str, onnx.TypeProto]

_WIDE = {onnx.TensorProto.INT64, onnx.TensorProto.UINT64}
_INTEGERS = _WIDE | {
    *(onnx.TensorProto.INT32, onnx.TensorProto.UINT32, onnx.TensorProto.INT16, onnx.TensorProto.UINT16),
    *(onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.BOOL),
}
_MOST_ELEMENTS = 1 << 16
# Operators whose outputs are elements of their inputs, and the slice of those inputs.
_MOVES: Mapping[str, slice] = {
    **dict.fromkeys(("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose"), slice(1)),
    **dict.fromkeys(("Expand", "Tile", "Slice", "Split", "Gather", "GatherElements", "GatherND"), slice(1)),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), slice(1)),
    **{"Concat": slice(None), "Max": slice(None), "Min": slice(None), "Where": slice(1, 3)},
    **dict.fromkeys(("ScatterND", "ScatterElements"), slice(0, 3, 2)),
}
# Operators whose extremes are at extremes of their operands.
_CORNERS: Mapping[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Clip": np.clip,
}
# Operators that sum elements, and operators that return indices.
_SUMS, _PLACES = ("ReduceSum", "CumSum"), ("ArgMax", "ArgMin", "NonZero", "TopK")
# A bound that keeps arithmetic on overly wide intervals within int64.
_FAR = 1 << 62


class Interval(NamedTuple):
    """The lowest and the highest value of each element of a tensor, in its shape; of a large tensor, `[]`, of all.

    If the values are known, both are the same array.
    """

    low: NDArray[Any]
    high: NDArray[Any]


class IntegerRanges:
    """The intervals of the integers of a model without ONNX functions; the module's docstring explains them.

    Args:
        model: the model; its floating point weights may be absent.
        folder: the folder of its external data.
        limits: for each integer input by name, one more than its largest value (the smallest is 0).
        sizes: the largest sizes of dynamic axes, by name.

    Attributes:
        known: the intervals of the graph's tensors of integers, and of constants, by name.
        largest: the largest magnitude of an int64, except ends of slices.
        count: how many times a node reads or gives an int64; moves of elements are not counted.
        beyond: nodes with an int64 that does not fit 32 bits, a sentence each.
        unknown: nodes with an int64 of which nothing is known, a sentence each.
    """

    def __init__(
        self, model: onnx.ModelProto, folder: Path, limits: Mapping[str, int], sizes: Mapping[str, int]
    ) -> None:
        self.largest, self.count, self.beyond, self.unknown = 0, 0, list[str](), list[str]()
        self._opsets, self._ir = list(model.opset_import), model.ir_version
        types: Types = {x.name: x.type for x in model.graph.value_info}
        known: dict[str, Interval] = {}
        self.known = known
        for given in model.graph.input:
            types[given.name] = _at_sizes(given.type, sizes)
            if given.name in limits:
                known[given.name] = _between(0, limits[given.name] - 1)
            elif (interval := _of_type(_element(given.type))) is not None:
                known[given.name] = interval
        self._read(model.graph, types, known, folder)

    def _read(self, graph: onnx.GraphProto, types: Types, known: dict[str, Interval], folder: Path) -> None:
        for tensor in graph.initializer:
            types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
            if tensor.data_type in _INTEGERS or (tensor.raw_data and not tensor.dims):
                interval = _of_type(tensor.data_type) if _is_absent(tensor) else None
                known[tensor.name] = interval or _exact(onnx.numpy_helper.to_array(tensor, str(folder)))
        for node in graph.node:
            for inner in graphs_of(node):  # intervals are not followed into subgraph inputs
                fed = {x.name: x.type for x in inner.input}
                hidden = {name: x for name, x in known.items() if name not in fed}
                self._read(inner, {**types, **{x.name: x.type for x in inner.value_info}, **fed}, hidden, folder)
            types |= self._types(node, types, known)
            found = self._values(node, types, known)
            for name, interval in zip_longest(node.output, found[: len(node.output)]):
                interval = interval or _of_type(_element(types.get(name)))
                if interval is not None:
                    known[name] = interval
            self._note(node, types, known)

    def _types(self, node: onnx.NodeProto, types: Types, known: Mapping[str, Interval]) -> Types:
        """Infer the types of a node's outputs, with sizes from known inputs; empty if they cannot be inferred."""
        constants = {
            name: onnx.numpy_helper.from_array(known[name].low, name)
            for name in node.input
            if name in known and _is_exact(known[name])
        }
        try:
            opset = next((x.version for x in self._opsets if x.domain == node.domain), 1)
            schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
            given = {name: types[name] for name in node.input if name}
            return dict(
                onnx.shape_inference.infer_node_outputs(
                    schema, node, given, constants, opset_imports=self._opsets, ir_version=self._ir
                )
            )
        except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError, KeyError, RuntimeError):
            return _blocked_product(node, types)

    def _values(self, node: onnx.NodeProto, types: Types, known: Mapping[str, Interval]) -> Sequence[Interval | None]:
        """Return the intervals of a node's outputs, None where nothing is known."""
        given = [known.get(name) for name in node.input if name]
        of = _shape(types.get(node.input[0])) if node.input else None
        if node.op_type == "Shape" and of is not None:
            attributes = {x.name: x.i for x in node.attribute}
            return [_exact(np.array(of[attributes.get("start", 0) : attributes.get("end")], np.int64))]
        exact = [x.low for x in given if x is not None and _is_exact(x)]
        small = all(_is_small(types.get(name)) for name in (*node.input, *node.output) if name)
        if len(exact) == len(given) and small and not list(graphs_of(node)):
            return [_exact(x) for x in self._compute(node, exact)]
        if not any(_is_integer(types.get(name)) for name in node.output):
            return []
        if node.op_type in _MOVES:
            return self._moved(node, types, known)
        if node.op_type in _PLACES and of is not None:
            return [None] * (len(node.output) - 1) + [_between(0, max(of, default=1) - 1)]
        if not given or any(y is None for y in given) or not _is_integer(types.get(node.input[0])):
            return []
        x, *others = (y for y in given if y is not None)
        if node.op_type == "Cast":
            return [x]
        if node.op_type in _SUMS and of is not None:
            return [_corners("Mul", [_hull([x]), _exact(np.asarray(prod(of)))])]
        if node.op_type == "Clip":
            low, high = ([*node.input[1:], "", ""])[:2]
            others = [known.get(low, _exact(np.asarray(-_FAR))), known.get(high, _exact(np.asarray(_FAR)))]
        if node.op_type in _CORNERS:
            return [_corners(node.op_type, [x, *others])]
        if node.op_type in ("Div", "Mod"):
            return [_divided(node.op_type, x, *others)]
        return [_hull([x, others[0]])] if node.op_type == "Range" else []

    def _moved(self, node: onnx.NodeProto, types: Types, known: Mapping[str, Interval]) -> Sequence[Interval | None]:
        """Return the intervals of an operator that selects or moves elements, from the lowest and highest values."""
        names = node.input[_MOVES[node.op_type]]
        if not all(name in known for name in names):
            return []
        others = [name for name in node.input if name and name not in names]
        if all(name in known and _is_exact(known[name]) for name in others) and all(
            _is_small(types.get(name)) for name in names
        ):
            ends = []
            for end in (0, 1):
                full = {name: np.broadcast_to(known[name][end], _shape(types[name]) or ()) for name in names}
                ends.append(self._compute(node, [full.get(x, known[x].low) for x in node.input if x]))
            return [Interval(low, high) for low, high in zip(*ends, strict=True)]
        return [_hull([known[name] for name in names])] * len(node.output)

    def _compute(self, node: onnx.NodeProto, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Compute a node's outputs with ONNX's reference implementation."""
        evaluator = ReferenceEvaluator(node, opsets={x.domain: x.version for x in self._opsets})
        names = [name for name in node.input if name]
        with np.errstate(all="ignore"):
            return [np.asarray(x) for x in evaluator.run(None, dict(zip(names, inputs, strict=True)))]

    def _note(self, node: onnx.NodeProto, types: Types, known: dict[str, Interval]) -> None:
        """Record the integers that a node computes or reads in `largest`, `beyond` and `unknown`."""
        if node.op_type in (*_MOVES, "Constant", "ConstantOfShape"):
            return
        made = set(node.output)
        for name in (*node.output, *node.input):
            if _element(types.get(name)) not in _WIDE:
                continue
            self.count += 1
            if name in known:
                most = max(abs(int(end)) for end in _hull([known[name]]))
                self.largest = max(self.largest, most)
                if most > LARGEST_SIZE:
                    verb = "gives" if name in made else "reads"
                    self.beyond.append(f"{node.op_type} {node.name or name!r} {verb} integers up to {most:,}")
                    if name in made:  # nodes that read it are not reported again
                        known[name] = _between(-LARGEST_SIZE, LARGEST_SIZE)
            elif name in made:
                self.unknown.append(f"{node.op_type} {node.name or name!r}")


def _blocked_product(node: onnx.NodeProto, types: Types) -> Types:
    """Return the output type of onnxruntime's products with matrices of few bits, unknown to ONNX; else nothing."""
    given = types.get(node.input[0]) if node.op_type == "MatMulNBits" else None
    if (shape := _shape(given)) is None:
        return {}
    columns = next(x.i for x in node.attribute if x.name == "N")
    return {node.output[0]: onnx.helper.make_tensor_type_proto(_element(given), [*shape[:-1], columns])}


def _exact(values: NDArray[Any]) -> Interval:
    return Interval(values, values)


def _is_exact(interval: Interval) -> bool:
    return interval.low is interval.high


def _between(low: int, high: int) -> Interval:
    """Return one interval for all elements of a tensor."""
    return Interval(np.asarray(low), np.asarray(high))


def _hull(intervals: Sequence[Interval]) -> Interval:
    """Return one interval that contains all elements of several."""
    filled = [x for x in intervals if x.low.size]
    if not filled:
        return _between(0, 0)
    return _between(min(int(x.low.min()) for x in filled), max(int(x.high.max()) for x in filled))


def _corners(op_type: str, operands: Sequence[Interval]) -> Interval:
    """Return the interval of the results for each choice of lowest and highest operands, without overflow."""
    choices = product(*_bounded(operands))
    found = [_CORNERS[op_type](*(x.astype(object) for x in choice)) for choice in choices]
    return Interval(_narrowed(reduce(np.minimum, found)), _narrowed(reduce(np.maximum, found)))


def _bounded(operands: Sequence[Interval]) -> Sequence[Interval]:
    """Return the operands; if their result would have many elements, one interval for all elements of each operand."""
    shape = np.broadcast_shapes(*(x.shape for interval in operands for x in interval))
    return operands if prod(shape) <= _MOST_ELEMENTS else [_hull([x]) for x in operands]


def _narrowed(x: NDArray[Any]) -> NDArray[np.int64]:
    return np.asarray(np.clip(x, -_FAR, _FAR)).astype(np.int64)


def _divided(op_type: str, x: Interval, by: Interval) -> Interval | None:
    """Return the interval of a quotient or remainder; None if the divisor may be below 1."""
    if not by.low.size or int(by.low.min()) < 1:
        return None
    if op_type == "Div":
        corners = [_narrowed(np.trunc(a / b)) for a, b in product(*_bounded((x, by)))]
        broadcast = np.broadcast_arrays(*corners)
        return Interval(np.min(broadcast, axis=0), np.max(broadcast, axis=0))
    whole, most = _hull([x]), int(by.high.max()) - 1
    return _between(0, min(int(whole.high), most)) if int(whole.low) >= 0 else _between(-most, most)


def _at_sizes(kind: onnx.TypeProto, sizes: Mapping[str, int]) -> onnx.TypeProto:
    """Return a type with sizes in place of the names of its dynamic axes."""
    found = onnx.TypeProto()
    found.CopyFrom(kind)
    for dimension in found.tensor_type.shape.dim:
        if dimension.dim_param in sizes:
            dimension.dim_value = sizes[dimension.dim_param]
    return found


def _shape(kind: onnx.TypeProto | None) -> list[int] | None:
    """Return the sizes of a type; None if one is dynamic."""
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    dimensions = kind.tensor_type.shape.dim
    return [x.dim_value for x in dimensions] if all(x.HasField("dim_value") for x in dimensions) else None


def _is_small(kind: onnx.TypeProto | None) -> bool:
    """Return whether a tensor is known to have few enough elements to compute each."""
    shape = _shape(kind)
    return shape is not None and prod(shape) <= _MOST_ELEMENTS


def _of_type(element: int) -> Interval | None:
    """Return the interval of an element type; None for wide integers and other types."""
    if element not in _INTEGERS - _WIDE:
        return None
    kind = onnx.helper.tensor_dtype_to_np_dtype(element)
    return _between(0, 1) if kind == np.bool_ else _between(np.iinfo(kind).min, np.iinfo(kind).max)


def _is_absent(tensor: onnx.TensorProto) -> bool:
    """Return whether a tensor has elements but no values: large 8-bit weights are not loaded, like floats."""
    inside = (tensor.raw_data, tensor.int32_data, tensor.int64_data, tensor.uint64_data)
    return 0 not in tensor.dims and not any(inside) and not uses_external_data(tensor)


def _element(kind: onnx.TypeProto | None) -> int:
    return 0 if kind is None else int(kind.tensor_type.elem_type)


def _is_integer(kind: onnx.TypeProto | None) -> bool:
    return _element(kind) in _INTEGERS
