"""Build the ONNX functions of the fused nodes: their definition in standard operators, stored in the file.

Formulas, shapes and names: `core.nodes.fused`. Each function is the fastest form that was found in onnxruntime among
standard operators; the comments name slower ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from ...core.nodes.fused import FUSED_BY_OP_TYPE, FUSED_DOMAIN, NORM_EPSILON
from .function_parts import FIRST_INT64, define, integers, real

# The first opset with Gelu.
_HAS_GELU = 20


def _read_streams(op: Any, streams: Any, weight: Any, gain: Any, constant: Any) -> tuple[Any, Any, Any]:
    """Compute a branch's input, mix and β; `(r @ W)/‖r‖` takes one pass over the streams less than `(r/‖r‖) @ W`."""
    squares = op.ReduceSum(op.Mul(streams, streams), integers(op, -1), keepdims=1)
    norm = op.Clip(op.Sqrt(squares), real(op, 1e-12))
    weights = op.Add(op.Mul(op.Tanh(op.Div(op.MatMul(streams, weight), norm)), gain), constant)
    count = op.Shape(streams, start=2, end=3)
    one = integers(op, 1)
    read, mix, beta = op.Split(weights, op.Concat(one, count, one, axis=0), axis=-1, _outputs=3)
    return op.Squeeze(op.MatMul(_as_row(op, read), streams), integers(op, 2)), mix, beta


def _mix_streams(op: Any, streams: Any, mix: Any, beta: Any, output: Any) -> Any:
    kept = op.MatMul(op.Transpose(mix, perm=[0, 1, 3, 2]), streams)
    return op.Add(kept, op.Mul(beta, op.Unsqueeze(output, integers(op, 2))))


def _norm(op: Any, x: Any, scale: Any, shift: Any) -> Any:
    return op.LayerNormalization(x, scale, shift, axis=-1, epsilon=NORM_EPSILON)


def _then_norm(read: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., tuple[Any, Any, Any]]:
    """Build a reading body whose first output is normalized."""

    def body(op: Any, streams: Any, weight: Any, gain: Any, constant: Any, scale: Any, shift: Any) -> Any:
        x, mix, beta = read(op, streams, weight, gain, constant)
        return _norm(op, x, scale, shift), mix, beta

    return body


def _then_read(write: Callable[..., Any], read: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., Any]:
    """Build a body that writes to the streams and then reads from them."""

    def body(op: Any, streams: Any, mix: Any, beta: Any, output: Any, *reading: Any) -> Any:
        written = write(op, streams, mix, beta, output)
        return (written, *_then_norm(read)(op, written, *reading))

    return body


def _add_to_streams(op: Any, streams: Any, beta: Any, output: Any) -> Any:
    return op.Add(streams, op.Mul(beta, op.Unsqueeze(output, integers(op, 2))))


def _begin_streams(op: Any, x: Any, mix: Any, beta: Any, output: Any) -> Any:
    axis = integers(op, 2)
    return op.Add(op.Mul(mix, op.Unsqueeze(x, axis)), op.Mul(beta, op.Unsqueeze(output, axis)))


def _end_streams(op: Any, streams: Any, mix: Any, beta: Any, output: Any) -> Any:
    """Compute `Σ_s (Σ_t mix[s, t])·r_s + (Σ_t beta_t)·output`, which sums weights instead of streams."""
    axis = integers(op, 2)
    mix, beta = op.ReduceSum(mix, integers(op, 3), keepdims=1), op.ReduceSum(beta, axis, keepdims=1)
    kept = op.MatMul(_as_row(op, mix), streams)
    return op.Squeeze(op.Add(kept, op.Mul(beta, op.Unsqueeze(output, axis))), axis)


def _as_row(op: Any, column: Any) -> Any:
    """Reshape `[B, N, S, 1]` → `[B, N, 1, S]`; a Transpose took twice as long."""
    return op.Reshape(column, integers(op, 0, 0, 1, -1))


def _rotate(op: Any, x: Any, cosine: Any, sine: Any) -> Any:
    """Rotate heads; their halves are swapped by reversing an axis, one copy where Split and Concat need two."""
    halves = op.Reshape(x, integers(op, 0, 0, 0, 2, -1))
    last, before_first, axis, step = (integers(op, value) for value in (-1, FIRST_INT64, 3, -1))
    turned = op.Slice(halves, last, before_first, axis, step)
    return op.Reshape(op.Add(op.Mul(halves, cosine), op.Mul(turned, sine)), integers(op, 0, 0, 0, -1))


def _rotate_pairs(op: Any, x: Any, cosine: Any, sine: Any) -> Any:
    """Rotate neighbouring channels; Split and Concat swap them in a third less time than a Slice of step -1."""
    pairs = op.Reshape(x, integers(op, 0, 0, 0, -1, 2))
    first, second = op.Split(pairs, integers(op, 1, 1), axis=-1, _outputs=2)
    turned = op.Concat(second, first, axis=-1)
    return op.Reshape(op.Add(op.Mul(pairs, cosine), op.Mul(turned, sine)), integers(op, 0, 0, 0, -1))


def _gated_gelu(op: Any, value: Any, gate: Any) -> Any:
    return op.Mul(value, op.Gelu(gate))


def _gated_gelu_by_erf(op: Any, value: Any, gate: Any) -> Any:
    half, root = (op.CastLike(real(op, number), gate) for number in (0.5, 0.5**0.5))
    one = op.CastLike(real(op, 1.0), gate)
    return op.Mul(value, op.Mul(op.Mul(gate, half), op.Add(op.Erf(op.Mul(gate, root)), one)))


def _gated_gelu_tanh(op: Any, value: Any, gate: Any) -> Any:
    return op.Mul(value, op.Gelu(gate, approximate="tanh"))


def _gated_gelu_by_tanh(op: Any, value: Any, gate: Any) -> Any:
    half, one, root, cubic = (op.CastLike(real(op, x), gate) for x in (0.5, 1.0, (2 / math.pi) ** 0.5, 0.044715))
    inner = op.Mul(root, op.Add(gate, op.Mul(cubic, op.Mul(gate, op.Mul(gate, gate)))))
    return op.Mul(value, op.Mul(op.Mul(gate, half), op.Add(op.Tanh(inner), one)))


def _gated_silu(op: Any, value: Any, gate: Any) -> Any:
    return op.Mul(value, op.Mul(gate, op.Sigmoid(gate)))


def _read_one(op: Any, streams: Any, weight: Any, gain: Any, constant: Any) -> tuple[Any, Any, Any]:
    """Compute the same for one token `[S, D]`. At this size each node costs the same, so use few."""
    unit = op.LpNormalization(streams, axis=-1, p=2)
    weights = op.Add(op.Mul(op.Tanh(op.MatMul(unit, weight)), gain), constant)
    count = op.Shape(streams, start=0, end=1)
    one = integers(op, 1)
    read, mix, beta = op.Split(weights, op.Concat(one, count, one, axis=0), axis=-1, _outputs=3)
    return op.MatMul(op.Transpose(read, perm=[1, 0]), streams), mix, beta


def _mix_one(op: Any, streams: Any, mix: Any, beta: Any, output: Any) -> Any:
    return op.Gemm(beta, output, op.MatMul(op.Transpose(mix, perm=[1, 0]), streams))


def _add_to_one(op: Any, streams: Any, beta: Any, output: Any) -> Any:
    return op.Gemm(beta, output, streams)


_BODIES: Mapping[str, Callable[..., Any]] = {
    "ReadStreams": _read_streams,
    "ReadStreamsNorm": _then_norm(_read_streams),
    "MixStreams": _mix_streams,
    "MixReadStreamsNorm": _then_read(_mix_streams, _read_streams),
    "AddToStreams": _add_to_streams,
    "BeginStreams": _begin_streams,
    "EndStreams": _end_streams,
    "RotateHeads": _rotate,
    "RotatePairs": _rotate_pairs,
    "GatedGelu": _gated_gelu,
    "GatedGeluTanh": _gated_gelu_tanh,
    "GatedSilu": _gated_silu,
}
# Replacement in opsets without Gelu.
_BODIES_WITHOUT_GELU: Mapping[str, Callable[..., Any]] = {
    "GatedGelu": _gated_gelu_by_erf,
    "GatedGeluTanh": _gated_gelu_by_tanh,
}
# Functions for streams `[S, D]` without axes of batch and length.
_BODIES_OF_ONE_TOKEN: Mapping[str, Callable[..., Any]] = {
    "ReadStreams": _read_one,
    "ReadStreamsNorm": _then_norm(_read_one),
    "MixStreams": _mix_one,
    "MixReadStreamsNorm": _then_read(_mix_one, _read_one),
    "AddToStreams": _add_to_one,
}


def build_fused(op_type: str, opset: int, nodes: Sequence[ir.Node] = ()) -> ir.Function:
    """Build the ONNX function of an op type of `core.nodes.fused`, the same for all nodes; see `functions.Builder`."""
    trace = _BODIES[op_type]
    if opset < _HAS_GELU:
        trace = _BODIES_WITHOUT_GELU.get(op_type, trace)
    if op_type in _BODIES_OF_ONE_TOKEN and nodes and all(_is_one_token(node) for node in nodes):
        trace = _BODIES_OF_ONE_TOKEN[op_type]
    return define(trace, op_type, FUSED_BY_OP_TYPE[op_type].inputs, (), opset, domain=FUSED_DOMAIN)


def _is_one_token(node: ir.Node) -> bool:
    streams = node.inputs[0]
    return streams is not None and streams.shape is not None and len(streams.shape) == 2
