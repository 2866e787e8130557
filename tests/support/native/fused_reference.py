"""The fused nodes in numpy: what `core.nodes.fused` says of them, in float64, and random inputs of their shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localattn.core.nodes.fused import FUSED_BY_OP_TYPE, NORM_EPSILON, ROTATIONS

Array = NDArray[Any]
Exact = tuple[NDArray[np.float64], ...]

_ERFC = np.frompyfunc(math.erfc, 1, 1)


def gelu(x: Array) -> NDArray[np.float64]:
    """`x·Φ(x)`."""
    x = x.astype(np.float64)
    result: NDArray[np.float64] = x * 0.5 * _ERFC(-x / math.sqrt(2)).astype(np.float64)
    return result


def gelu_tanh(x: Array) -> NDArray[np.float64]:
    """`x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`; `1 + tanh u` as `2/(1 + e⁻²ᵘ)`, which keeps its digits."""
    x = x.astype(np.float64)
    result: NDArray[np.float64] = x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


def silu(x: Array) -> NDArray[np.float64]:
    """`x/(1 + e⁻ˣ)`."""
    x = x.astype(np.float64)
    result: NDArray[np.float64] = x / (1 + np.exp(-x))
    return result


def _read_streams(streams: Array, weight: Array, gain: Array, constant: Array) -> Exact:
    norm = np.maximum(np.sqrt((streams**2).sum(axis=-1, keepdims=True)), 1e-12)
    weights = np.tanh((streams @ weight) / norm) * gain + constant
    read = (weights[..., :1] * streams).sum(axis=-2)
    return read, weights[..., 1:-1], weights[..., -1:]


def _mix_streams(streams: Array, mix: Array, beta: Array, output: Array) -> Exact:
    return (np.einsum("...st,...sd->...td", mix, streams) + beta * output[..., None, :],)


def _spread(x: Array) -> Array:
    spread: Array = np.sqrt(x.var(axis=-1, keepdims=True) + NORM_EPSILON)
    return spread


def _read_norm(streams: Array, weight: Array, gain: Array, constant: Array, scale: Array, shift: Array) -> Exact:
    x, mix, beta = _read_streams(streams, weight, gain, constant)
    return (x - x.mean(axis=-1, keepdims=True)) / _spread(x) * scale + shift, mix, beta


def _mix_read_norm(streams: Array, mix: Array, beta: Array, output: Array, *reading: Array) -> Exact:
    (written,) = _mix_streams(streams, mix, beta, output)
    return written, *_read_norm(written, *reading)


def _add_to_streams(streams: Array, beta: Array, output: Array) -> Exact:
    return (streams + beta * output[..., None, :],)


def _begin_streams(x: Array, mix: Array, beta: Array, output: Array) -> Exact:
    return (mix * x[..., None, :] + beta * output[..., None, :],)


def _end_streams(streams: Array, mix: Array, beta: Array, output: Array) -> Exact:
    return (_mix_streams(streams, mix, beta, output)[0].sum(axis=-2),)


def _rotate(x: Array, cosine: Array, sine: Array) -> Exact:
    # The tables of [B, N, H, D] have an axis of one for the heads.
    table = (*cosine.shape[:-2], x.shape[-1])
    first, second = np.split(x, 2, axis=-1)
    turned = np.concatenate((second, first), axis=-1)
    return (x * cosine.reshape(table) + turned * sine.reshape(table),)


def _rotate_pairs(x: Array, cosine: Array, sine: Array) -> Exact:
    table = (*cosine.shape[:-2], x.shape[-1])
    turned = x[..., np.arange(x.shape[-1]) ^ 1]
    return (x * cosine.reshape(table) + turned * sine.reshape(table),)


def _gated_gelu(value: Array, gate: Array) -> Exact:
    return (value * gelu(gate),)


def _gated_gelu_tanh(value: Array, gate: Array) -> Exact:
    return (value * gelu_tanh(gate),)


def _gated_silu(value: Array, gate: Array) -> Exact:
    return (value * silu(gate),)


_FORMULAS: dict[str, Callable[..., Exact]] = {
    "ReadStreams": _read_streams,
    "ReadStreamsNorm": _read_norm,
    "MixStreams": _mix_streams,
    "MixReadStreamsNorm": _mix_read_norm,
    "AddToStreams": _add_to_streams,
    "BeginStreams": _begin_streams,
    "EndStreams": _end_streams,
    "RotateHeads": _rotate,
    "RotatePairs": _rotate_pairs,
    "GatedGelu": _gated_gelu,
    "GatedGeluTanh": _gated_gelu_tanh,
    "GatedSilu": _gated_silu,
}


def expected(op_type: str, inputs: dict[str, Array]) -> dict[str, NDArray[np.float64]]:
    """The outputs of a node in float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        outputs = _FORMULAS[op_type](*(array.astype(np.float64) for array in inputs.values()))
    return dict(zip(FUSED_BY_OP_TYPE[op_type].outputs, outputs, strict=True))


def magnified(op_type: str, inputs: dict[str, Array]) -> float:
    """How much larger a LayerNorm makes the errors of what it takes: rows of a few channels may be nearly equal."""
    if not op_type.endswith("Norm"):
        return 1.0
    wide = {name: array.astype(np.float64) for name, array in inputs.items()}
    if op_type == "MixReadStreamsNorm":
        (wide["streams"],) = _mix_streams(*(wide[name] for name in ("streams", "mix", "beta", "output")))
    x, *_ = _read_streams(*(wide[name] for name in ("streams", "weight", "gain", "constant")))
    factors = np.abs(wide["scale"]).max(initial=0.0) * np.abs(x).max(initial=1.0) / _spread(x)
    return float(factors.max(initial=1.0))


def shapes(
    op_type: str,
    batch: Any,
    length: Any,
    streams: int,
    dim: int,
    heads: int = 2,
    *,
    heads_first: bool = False,
    own_positions: bool = False,
) -> dict[str, list[Any]]:
    """Shapes of a node's inputs; batch and length may be names."""
    tokens = [batch, length]
    rotated = [batch, heads, length, dim] if heads_first else [batch, length, heads, dim]
    channels = [dim // 2, 2] if op_type == "RotatePairs" else [2, dim // 2]
    table = [length, *channels] if heads_first else [length, 1, *channels]
    if own_positions:
        table = [batch, *([1] if heads_first else []), *table]
    known = {
        "streams": [*tokens, streams, dim],
        "weight": [dim, streams + 2],
        "gain": [streams, streams + 2],
        "constant": [streams, streams + 2],
        "mix": [*tokens, streams, 1 if op_type == "BeginStreams" else streams],
        "beta": [*tokens, streams, 1],
        "output": [*tokens, dim],
        "scale": [dim],
        "shift": [dim],
        "x": rotated if op_type in ROTATIONS else [*tokens, dim],
        "cosine": table,
        "sine": table,
        "value": [*tokens, dim],
        "gate": [*tokens, dim],
    }
    return {name: known[name] for name in FUSED_BY_OP_TYPE[op_type].inputs}


def output_shapes(op_type: str, inputs: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Shapes of its outputs."""
    first, *_ = inputs.values()
    if op_type in ("ReadStreams", "ReadStreamsNorm", "MixReadStreamsNorm"):
        *tokens, streams, dim = first
        read = [[*tokens, dim], [*tokens, streams, streams], [*tokens, streams, 1]]
        written = [first] if op_type == "MixReadStreamsNorm" else []
        return dict(zip(FUSED_BY_OP_TYPE[op_type].outputs, [*written, *read], strict=True))
    shape = first
    if op_type == "BeginStreams":
        shape = [*inputs["beta"][:3], first[-1]]
    elif op_type == "EndStreams":
        shape = inputs["output"]
    return dict.fromkeys(FUSED_BY_OP_TYPE[op_type].outputs, shape)


def random_inputs(sizes: dict[str, list[Any]], element: Any, seed: int = 0) -> dict[str, Array]:
    """Numbers of the normal distribution, of one element type."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(element) for name, shape in sizes.items()}
