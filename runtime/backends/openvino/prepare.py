"""Prepare an ONNX file for OpenVINO: the file itself, or a copy in the operators that OpenVINO reads.

OpenVINO 2026.4 does not support ONNX functions, and mistakes values that a Scan reads from outside for states without
a result (`onnx_graph.standard_ops.scan_states`). It computes int64 in 32 bits, without an error: a file with larger
numbers is refused.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from ....core.error_texts import argument
from ....core.errors import UsageError
from ....onnx_graph.graph_values import all_graphs, all_nodes, reads
from ....onnx_graph.judgement import claimed_bytes, tensors_of
from ....onnx_graph.library_errors import infer_shapes, refused_as
from ....onnx_graph.onnx_file import OnnxFile

_WIDEST = (1 << 31) - 1
# The location of external data in memory, as onnxruntime and OpenVINO write it; its offset is the address.
_IN_MEMORY = "*/_ORT_MEM_ADDR_/*"
# OpenVINO 2026.4 compiled 14 Ifs in each other in 1.4 s, 16 in 4.6 s, and 25 not in 90 s.
_MOST_DOUBLED = 1 << 17
# Operators that OpenVINO 2026.4 joins where one follows another and nothing else reads its result. The time follows
# the third power of their number: 500 Relus 1.7 s of a processor, 1,000 Relus 10.9 s; Additions a fifth of it.
_JOINED = frozenset(
    (
        "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitwiseAnd", "BitwiseNot",
        "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div", "Dropout", "Elu", "Equal",
        "Erf", "Exp", "Flatten", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish",
        "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg",
        "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Reshape", "Round", "Selu", "Sigmoid", "Sign", "Sin",
        "Sinh", "Softplus", "Softsign", "Sqrt", "Squeeze", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu",
        "Transpose", "Unsqueeze", "Where", "Xor",
    )
)  # fmt: skip
# The sum of the squares of their places in their rows: 1,172 in one row.
_MOST_JOINED = 1 << 29
# What an operator adds to the places after it, where it is not one: 1,000 Identities took 0.25 s, 2,000 took 1.7 s.
_ADDED = {"Identity": 1 / 3}
# The domains of operators that OpenVINO 2026.4 reads.
_DOMAINS = ("", "ai.onnx.ml", "com.microsoft", "org.openvinotoolkit", "org.pytorch.aten", "mmdeploy")
# Operators whose results may exceed 32 bits if an operand does. Slice and similar operators clip what is too large.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Mod")


@contextlib.contextmanager
def readable(file: OnnxFile) -> Iterator[bytes]:
    """Give the bytes of a model that OpenVINO can read; weights in files are mapped until this ends.

    Raises:
        UsageError: the file needs wider integers than OpenVINO has, nests deeper than OpenVINO compiles, or its data
            cannot be read.
    """
    what = f"{file.name} cannot be run in OpenVINO."
    if file.growth.doubled - file.growth.nodes > _MOST_DOUBLED:
        raise UsageError(
            what,
            why=f"Its graphs lie {file.growth.depth} deep in each other; OpenVINO takes twice as long for each.",
            fix=f"Run it in onnxruntime: leave {argument('runtime')} out.",
        )
    mapped: dict[str, Any] = {}
    with refused_as(what, "Export the model again, or run the file in onnxruntime."):
        model = _prepared(file)
        for tensor in tensors_of(model):
            if tensor.data_location == tensor.EXTERNAL:
                _point(tensor, mapped, file)
        content = bytes(model.SerializeToString())
    yield content
    mapped.clear()


def _point(tensor: Any, mapped: dict[str, Any], file: OnnxFile) -> None:
    """Make external data an address in memory: given bytes, OpenVINO finds no files, and given a path, no links."""
    said = {entry.key: entry.value for entry in tensor.external_data}
    location, offset, needed = said["location"], int(said.get("offset") or 0), claimed_bytes(tensor) or 0
    if location not in mapped:
        mapped[location] = file.map_data(location)
    data = mapped[location]
    if offset + needed > data.size:
        raise ValueError(f"{location} is cut")
    del tensor.external_data[:]
    for key, text in (("location", _IN_MEMORY), ("offset", data.ctypes.data + offset), ("length", needed)):
        tensor.external_data.add(key=key, value=str(text))


def _prepared(file: OnnxFile) -> Any:
    """Return the model in operators that OpenVINO reads, as `OnnxFile.parse_without_weights`.

    Raises:
        UsageError: it needs wider integers than OpenVINO has, or its copy is too large.
    """
    from ....onnx_graph import inlining
    from ....onnx_graph.precision import half_to_fp32
    from ....onnx_graph.standard_ops import scan_states

    model = file.parse_without_weights()
    wide = next(_wide_nodes(model, file), None)
    if wide is not None:
        raise UsageError(
            f"{file.name} cannot be run in OpenVINO.",
            why=f"Its node {wide!r} computes with integers beyond 32 bits, which OpenVINO cuts off without an error.",
            fix="Export the model again with this release; or run the file in onnxruntime.",
        )
    plain = scan_states.apply(inlining.apply(half_to_fp32.apply(model)))
    _check_operators(plain, file)
    _check_rows(plain, file)
    infer_shapes(plain, strict_mode=True)
    return plain


def _check_operators(model: Any, file: OnnxFile) -> None:
    """Refuse a model with operators of domains that OpenVINO has not, on which 2026.4.1 may end the process.

    Shapes that contradict each other end it too: `_prepared` has onnx infer them strictly first.

    Raises:
        UsageError: it has one.
    """
    for node in all_nodes(model.graph):
        if node.domain not in _DOMAINS:
            raise UsageError(
                f"{file.name} cannot be run in OpenVINO.",
                why=f"The file has no function for {node.domain}::{node.op_type}, and OpenVINO has no such operator.",
                fix=f"Run it in onnxruntime: leave {argument('runtime')} out.",
            )


def _check_rows(model: Any, file: OnnxFile) -> None:
    """Refuse a model with more operators in a row than OpenVINO joins in some seconds.

    Raises:
        UsageError: it has more.
    """
    places = [place for graph in all_graphs(model.graph) for place in _places_in_rows(graph)]
    if sum(place * place for place in places) > _MOST_JOINED:
        raise UsageError(
            f"{file.name} cannot be run in OpenVINO.",
            why=f"Up to {round(max(places))} of its operators in a row compute number by number; OpenVINO would "
            "join them for minutes.",
            fix=f"Run it in onnxruntime: leave {argument('runtime')} out.",
        )


def _places_in_rows(graph: Any) -> list[float]:
    """Return the places, from 1, of nodes in rows of operators that OpenVINO joins; nodes are in any order."""
    joined = [node for node in graph.node if node.op_type in _JOINED and not node.domain]
    readers = Counter(name for node in graph.node for name in set(reads(node)))
    readers.update(value.name for value in graph.output)
    makers = {name: index for index, node in enumerate(joined) for name in node.output}
    before: list[set[int]] = [{makers[name] for name in node.input if name in makers} for node in joined]
    after: list[list[int]] = [[] for _ in joined]
    for index, needed in enumerate(before):
        for maker in needed:
            after[maker].append(index)
    added = [_ADDED.get(node.op_type, 1.0) for node in joined]
    places, waiting = list(added), [len(needed) for needed in before]
    ready = [index for index, count in enumerate(waiting) if not count]
    while ready:
        maker = ready.pop()
        for reader in after[maker]:
            if sum(readers[name] for name in joined[maker].output) == 1:
                places[reader] = max(places[reader], places[maker] + added[reader])
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    return places


def _wide_nodes(model: Any, file: OnnxFile) -> Iterator[str]:
    """Yield names of nodes that compute with constants beyond 32 bits."""
    for part in (model.graph, *model.functions):
        wide = set(_wide_constants(part, file))
        for node in all_nodes(part):
            if node.op_type in _ARITHMETIC and not wide.isdisjoint(node.input):
                yield node.name or node.op_type


def _wide_constants(part: Any, file: OnnxFile) -> Iterator[str]:
    """Yield names of weights and constants of a graph or function that hold integers beyond 32 bits."""
    for tensor in getattr(part, "initializer", ()):
        if _is_wide(tensor, file):
            yield tensor.name
    for node in all_nodes(part):
        if node.op_type == "Constant" and node.attribute:
            attribute = node.attribute[0]
            numbers = (attribute.i, *attribute.ints)
            if _is_wide(attribute.t, file) or any(abs(number) > _WIDEST for number in numbers):
                yield node.output[0]


def _is_wide(tensor: Any, file: OnnxFile) -> bool:
    import onnx

    if tensor.data_type != onnx.TensorProto.INT64:
        return False
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        numbers = np.frombuffer(file.data_of(tensor), "<i8")
    else:
        numbers = onnx.numpy_helper.to_array(tensor)
    return bool(numbers.size) and max(-int(numbers.min()), int(numbers.max())) > _WIDEST
