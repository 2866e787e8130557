"""Prepare an ONNX file for OpenVINO: the file itself, or a copy in the operators that OpenVINO reads.

OpenVINO 2026.4 does not support ONNX functions, and mistakes values that a Scan reads from outside for states without
a result (`onnx_graph.standard_ops.scan_states`). It computes int64 in 32 bits, without an error: a file with larger
numbers is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...core.errors import UsageError
from ...onnx_graph.graph_values import all_nodes
from ...onnx_graph.onnx_file import OnnxFile

_WIDEST = (1 << 31) - 1
# Operators whose results may exceed 32 bits if an operand does. Slice and similar operators clip what is too large.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Mod")


def readable(file: OnnxFile) -> str | bytes:
    """Return the path of a file, its bytes, or the bytes of a copy that OpenVINO can read.

    Raises:
        UsageError: the file is no ONNX model, needs wider integers than OpenVINO has, or its copy is too large.
    """
    from ...onnx_graph import inlining
    from ...onnx_graph.precision import half_to_fp32
    from ...onnx_graph.standard_ops import scan_states

    model = file.parse()
    wide = next(_wide_nodes(model), None)
    if wide is not None:
        raise UsageError(
            f"{file.name} cannot be run in OpenVINO.",
            why=f"Its node {wide!r} computes with integers beyond 32 bits, which OpenVINO cuts off without an error.",
            fix="Export the model again with this release; or run the file in onnxruntime.",
        )
    try:
        if file.folder is not None and _changes(model):
            inlining.read_weights(model, file.folder)
    except ValueError as error:
        raise UsageError(
            f"{file.name} cannot be run in OpenVINO.",
            why=f"Its functions must be inlined first. {error}",
            fix="Write it without functions: localattn convert MODEL -o plain.onnx --standard-ops",
        ) from error
    plain = scan_states.apply(inlining.apply(half_to_fp32.apply(model)))
    if plain is not model:
        return bytes(plain.SerializeToString())
    return file.name if file.scan.locations else file.content  # given bytes, it could not find external data


def _changes(model: Any) -> bool:
    """Return whether a copy is needed, without reading the weights."""
    import onnx

    kinds = {tensor.data_type for tensor in model.graph.initializer}
    scans = any(node.op_type == "Scan" for node in model.graph.node)
    return bool(model.functions) or scans or onnx.TensorProto.BFLOAT16 in kinds


def _wide_nodes(model: Any) -> Iterator[str]:
    """Yield names of nodes that compute with constants beyond 32 bits."""
    for part in (model.graph, *model.functions):
        wide = set(_wide_constants(part))
        for node in all_nodes(part):
            if node.op_type in _ARITHMETIC and not wide.isdisjoint(node.input):
                yield node.name or node.op_type


def _wide_constants(part: Any) -> Iterator[str]:
    """Yield names of weights and constants of a graph or function that hold integers beyond 32 bits."""
    for tensor in getattr(part, "initializer", ()):
        if _is_wide(tensor):
            yield tensor.name
    for node in all_nodes(part):
        if node.op_type == "Constant":
            attribute = node.attribute[0]
            numbers = (attribute.i, *attribute.ints)
            if _is_wide(attribute.t) or any(abs(number) > _WIDEST for number in numbers):
                yield node.output[0]


def _is_wide(tensor: Any) -> bool:
    import onnx

    if tensor.data_type != onnx.TensorProto.INT64 or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return False
    return any(abs(int(number)) > _WIDEST for number in onnx.numpy_helper.to_array(tensor).flat)
