"""The operations between a module's matrix products: a fused node while exporting, plain PyTorch otherwise.

Formulas, shapes and names: `core.nodes.fused`. The nodes' ONNX functions are in `exporter/lowering/fused_functions.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....core.nodes.fused import FUSED_BY_OP_TYPE, FUSED_DOMAIN, FUSED_VERSION


def norm(x: Tensor) -> Tensor:
    """Compute the Euclidean norm of the last axis, at least 1e-12, `[…, D]` → `[…, 1]` fp32.

    The results are those of `torch.nn.functional.normalize`, which exports an additional Expand node; in fp16 the sum
    of squares would overflow at a norm of 256. The squares are summed by Mul and ReduceSum, for which onnxruntime has a
    fast path; ReduceL2 took 2.3 times as long (4096 vectors of 256, one thread).
    """
    precise = x.float()
    length: Tensor = (precise * precise).sum(dim=-1, keepdim=True).sqrt().clamp_min(1e-12)
    return length


def unit_norm(x: Tensor) -> Tensor:
    """Divide by `norm`, `[…, D]` → `[…, D]` fp32."""
    return x.float() / norm(x)


def stream_weights(x: Tensor, weight: Tensor, gain: Tensor, constant: Tensor) -> Tensor:
    """Compute the weights `A` of a hyper-connection, `[…, D]` → `[…, columns]`."""
    return torch.tanh(x @ weight / norm(x)) * gain + constant


def combine(streams: Tensor, weights: Tensor) -> Tensor:
    """Compute `Σ_s weights_s·r_s`, `[B, N, S, D]` and `[B, N, S, 1]` → `[B, N, 1, D]`."""
    combined: Tensor = weights.transpose(-1, -2) @ streams
    return combined


def read_streams(streams: Tensor, weight: Tensor, gain: Tensor, constant: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a branch's input `[B, N, D]`, mix `[B, N, S, S]` and β `[B, N, S, 1]` from streams `[B, N, S, D]`.

    Or of one token: `[1, D]`, `[S, S]` and `[S, 1]` from `[S, D]`.
    """
    if torch.onnx.is_in_onnx_export():
        *batch, count, dim = streams.shape
        shapes = [(*(batch or [1]), dim), (*batch, count, count), (*batch, count, 1)]
        read, mix, beta = _node("ReadStreams", [streams, weight, gain, constant], shapes)
        return read, mix, beta
    weights = stream_weights(streams, weight, gain, constant)
    read = combine(streams, weights[..., :1])
    return read if read.dim() == 2 else read.squeeze(-2), weights[..., 1:-1], weights[..., -1:]


def write_streams(streams: Tensor, mix: Tensor | None, beta: Tensor, output: Tensor) -> Tensor:
    """Write a branch's `output [B, N, D]` to the streams `[B, N, S, D]`; without a mix the streams are not mixed.

    Or of one token: `[1, D]` to `[S, D]`.
    """
    if torch.onnx.is_in_onnx_export():
        if mix is None:
            return _node("AddToStreams", [streams, beta, output], [streams.shape])[0]
        return _node("MixStreams", [streams, mix, beta, output], [streams.shape])[0]
    kept = streams if mix is None else mix.transpose(-1, -2) @ streams
    written: Tensor = kept + beta * (output if streams.dim() == 2 else output.unsqueeze(-2))
    return written


def begin_streams(x: Tensor, mix: Tensor, beta: Tensor, output: Tensor) -> Tensor:
    """Begin the streams `[B, N, S, D]` as `mix·x + beta·output`, from `[B, N, D]` and weights `[B, N, S, 1]`."""
    if torch.onnx.is_in_onnx_export():
        shape = (*x.shape[:2], mix.shape[2], x.shape[2])
        return _node("BeginStreams", [x, mix, beta, output], [shape])[0]
    written: Tensor = mix * x.unsqueeze(-2) + beta * output.unsqueeze(-2)
    return written


def end_streams(streams: Tensor, mix: Tensor, beta: Tensor, output: Tensor) -> Tensor:
    """Compute the sum `[B, N, D]` of the streams after a branch wrote to them, as `write_streams` with a mix."""
    if torch.onnx.is_in_onnx_export():
        return _node("EndStreams", [streams, mix, beta, output], [output.shape])[0]
    kept = combine(streams, mix.sum(dim=-1, keepdim=True)).squeeze(-2)
    written: Tensor = kept + beta.sum(dim=-2) * output
    return written


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate every head by its position's angles; the shape is unchanged.

    The halves of a head are swapped by reversing an axis: one copy, where splitting and joining them needs two.
    """
    if torch.onnx.is_in_onnx_export():
        return _node("RotateHeads", [x, cosine, sine], [x.shape])[0]
    halves = x.reshape(*x.shape[:-1], 2, -1)
    rotated: Tensor = (halves * cosine + halves.flip(-2) * sine).flatten(-2)
    return rotated


def gated_gelu(value: Tensor, gate: Tensor) -> Tensor:
    """Compute `value·gelu(gate)`, of any shape."""
    if torch.onnx.is_in_onnx_export():
        return _node("GatedGelu", [value, gate], [value.shape])[0]
    return value * F.gelu(gate)


def _node(op_type: str, inputs: Sequence[Tensor], shapes: Sequence[Sequence[int | torch.SymInt]]) -> Sequence[Tensor]:
    """Add a node to the graph, and return its outputs, all of its first input's element type."""
    assert len(inputs) == len(FUSED_BY_OP_TYPE[op_type].inputs)
    return torch.onnx.ops.symbolic_multi_out(
        f"{FUSED_DOMAIN}::{op_type}",
        inputs,
        dtypes=[inputs[0].dtype] * len(shapes),
        shapes=shapes,
        version=FUSED_VERSION,
    )
