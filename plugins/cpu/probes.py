"""Define a small call of every compiled kernel, whose result is known without running the same computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.geometry import WindowGeometry
from ...core.nodes.aft import AFT_VARIANT_BY_OP_TYPE
from ...core.nodes.attention import DOMAIN, VARIANT_BY_OP_TYPE, NodeAttributes
from ...core.nodes.fused import FUSED_BY_OP_TYPE, NORM_EPSILON
from ...core.nodes.grouped import GROUPED_BY_OP_TYPE, GroupedAttributes
from ...core.nodes.step import STEP_VARIANT_BY_OP_TYPE, StepAttributes, ring_slots
from ...core.storage.cpu_library import KERNELS

Arrays = dict[str, NDArray[Any]]
# Inputs and outputs of a fused node, in order.
InAndOut = tuple[list[NDArray[Any]], list[NDArray[Any]]]

_BATCH, _LENGTH, _HEADS, _HEAD_DIM, _STREAMS = 1, 24, 2, 8, 4
_WINDOW = NodeAttributes(WindowGeometry(8, 1, 0, causal=True), _HEAD_DIM**-0.5)
_PHI_1 = 0.8413447460685429  # the normal distribution at 1
_GELU_TANH_1 = (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715)) / 2
_NUMPY = {"fp32": np.float32, "fp16": np.float16}


@dataclass(frozen=True)
class Probe:
    """A call and its result.

    Args:
        domain: of the node.
        op_type: of the node.
        dtype: element type of its real inputs, "fp32" or "fp16".
        feed: the inputs, in order.
        expected: the outputs, in order.
        attributes: of the node.
    """

    domain: str
    op_type: str
    dtype: str
    feed: Arrays
    expected: Arrays
    attributes: Mapping[str, Any] = field(default_factory=dict)


def probes() -> Iterator[Probe]:
    """Yield one probe for every kernel and element type."""
    for (domain, op_type), dtypes in KERNELS.items():
        for dtype in dtypes:
            element = _NUMPY[dtype]
            if op_type in AFT_VARIANT_BY_OP_TYPE:
                feed, expected = _aft(op_type)
                yield Probe(domain, op_type, dtype, feed, {"output": expected})
            elif op_type in STEP_VARIANT_BY_OP_TYPE:
                yield Probe(domain, op_type, dtype, *_ring(op_type, element))
            elif domain == DOMAIN:
                make = _grouped if op_type in GROUPED_BY_OP_TYPE else _attention
                feed, expected, attributes = make(op_type, element)
                yield Probe(domain, op_type, dtype, feed, {"output": expected}, attributes)
            else:
                arrays, results = _FUSED[op_type](element)
                node = FUSED_BY_OP_TYPE[op_type]
                named = dict(zip(node.outputs, results, strict=True))
                yield Probe(domain, op_type, dtype, dict(zip(node.inputs, arrays, strict=True)), named)


def _attention(op_type: str, element: Any) -> tuple[Arrays, NDArray[Any], dict[str, Any]]:
    """Make attention inputs with equal scores: every query's output is the mean of the values it sees.

    With xpos keys are zeros, because scores of 0 are equal at any distance.
    """
    variant = VARIANT_BY_OP_TYPE[op_type]
    shape = (_BATCH, _LENGTH, _HEADS, _HEAD_DIM)
    geometry, value = _WINDOW.geometry, _random(element, *shape)
    given = {
        "query": np.ones(shape, element),
        "key": np.full(shape, 0 if variant.has_xpos else 1, element),
        "value": value,
        "key_mask": np.ones((_BATCH, _LENGTH), bool),
        "attn_bias": np.zeros((_HEADS, geometry.window_size, geometry.keys_per_window), element),
    }
    attributes = replace(_WINDOW, xpos_scale_base=4.0 if variant.has_xpos else 0.0)
    return {name: given[name] for name in variant.input_names}, _means(geometry, value), attributes.as_onnx()


def _grouped(op_type: str, element: Any) -> tuple[Arrays, NDArray[Any], dict[str, Any]]:
    """Make grouped inputs with equal scores: a head's output is the mean of what its head of values has.

    A sink of the same score takes one part of as many as there are keys, and itself.
    """
    variant = GROUPED_BY_OP_TYPE[op_type]
    geometry = WindowGeometry.all_keys(causal=True) if variant.sees_all else _WINDOW.geometry
    attributes = GroupedAttributes(geometry, _WINDOW.scale, 1e4 if variant.has_softcap else 0.0)
    value = _random(element, _BATCH, _LENGTH, _HEADS, _HEAD_DIM)
    shape = (_BATCH, _LENGTH, 2 * _HEADS, _HEAD_DIM)
    given = {
        "query": np.ones(shape, element),
        "key": np.ones(value.shape, element),
        "value": value,
        "key_mask": np.ones((_BATCH, _LENGTH), bool),
        "sinks": np.full(2 * _HEADS, _HEAD_DIM * _WINDOW.scale, element),
    }
    expected = np.repeat(_means(geometry, value), 2, axis=2)
    if variant.has_sinks:
        first, end = geometry.visible_interval(np.arange(_LENGTH), _LENGTH)
        expected *= ((end - first) / (end - first + 1))[:, None, None]
    return {name: given[name] for name in variant.input_names}, expected, attributes.as_onnx()


def _means(geometry: WindowGeometry, value: NDArray[Any]) -> NDArray[Any]:
    """Return the mean of the values that each query sees."""
    first, end = geometry.visible_interval(np.arange(_LENGTH), _LENGTH)
    wide = value.astype(np.float64)
    return np.stack([wide[:, a:b].mean(axis=1) for a, b in zip(first, end, strict=True)], axis=1)


def _ring(op_type: str, element: Any) -> tuple[Arrays, Arrays, dict[str, Any]]:
    """Make a step or a chunk with equal scores: a query's output is the mean of the values that its biases show.

    A sink of the same score takes one part of as many as there are keys, and itself.
    """
    variant = STEP_VARIANT_BY_OP_TYPE[op_type]
    groups = 2 if variant.grouped else 1
    rows, slots = 5 if variant.chunked else 1, ring_slots(_WINDOW.geometry)
    attributes = StepAttributes(
        _WINDOW.geometry, _WINDOW.scale, xpos_scale_base=4.0 * variant.has_xpos, softcap=1e4 * variant.has_softcap
    )
    ring, new = (_BATCH, _HEADS, slots, _HEAD_DIM), (_BATCH, _HEADS, rows, _HEAD_DIM)
    old, value = _random(element, *ring), _random(element, *new, seed=1)
    values = np.concatenate((old, value), axis=2) if variant.chunked else old.copy()
    if not variant.chunked:
        values[:, :, 3] = value[:, :, 0]
    keys = values.shape[2]
    seen = (np.arange(keys) + np.arange(rows)[:, None]) % 3 > 0
    replaced = np.where(np.arange(slots) < rows, slots + np.arange(slots), np.arange(slots))
    places = np.stack([np.zeros(_HEADS), np.arange(_HEADS), np.full(_HEADS, 3)], axis=-1)[None, :, None]
    given = {
        "query": np.ones((_BATCH, groups * _HEADS, rows, _HEAD_DIM), element),
        "key": np.ones(new, element),
        "value": value,
        "key_cache": np.ones(ring, element),
        "value_cache": old,
        "score_bias": np.where(seen, 0, -2e30).astype(np.float32),
        "write_index": (replaced if variant.chunked else places).astype(np.int64),
        "query_scale": np.ones((rows, _HEAD_DIM), np.float32),
        "key_scale": np.ones((keys, _HEAD_DIM), np.float32),
        "sinks": np.full(groups * _HEADS, _HEAD_DIM * _WINDOW.scale, element),
    }
    weights = seen / (seen.sum(axis=1, keepdims=True) + variant.has_sinks)
    output = np.repeat(weights @ values.astype(np.float64), groups, axis=1)
    after = values[:, :, replaced] if variant.chunked else values
    expected = {"output": output, "next_key_cache": given["key_cache"], "next_value_cache": after}
    return {name: given[name] for name in variant.input_names}, expected, attributes.as_onnx(variant)


def _aft(op_type: str) -> tuple[Arrays, NDArray[Any]]:
    """Make AFT-local inputs with equal logits and open gates: outputs are half the mean of the values that are seen."""
    variant = AFT_VARIANT_BY_OP_TYPE[op_type]
    value = _random(np.float32, _LENGTH, _BATCH, _HEAD_DIM)
    columns = _WINDOW.geometry.window_size
    zeros = np.zeros_like(value)
    given = {
        "gate": zeros,
        "key": zeros,
        "value": value,
        "position_bias": np.zeros((_LENGTH, columns if variant.causal else 2 * columns - 1), np.float32),
        "key_mask": np.ones((_BATCH, _LENGTH), bool),
    }
    wide = value.astype(np.float64)
    counts = np.arange(1, _LENGTH + 1)[:, None, None]
    mean = wide.cumsum(axis=0) / counts if variant.causal else np.broadcast_to(wide.mean(axis=0), wide.shape)
    return {name: given[name] for name in variant.input_names}, 0.5 * mean


def _random(element: Any, *shape: int, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(element)


def _per_token(weights: NDArray[Any]) -> NDArray[Any]:
    """Repeat the same weights for every token."""
    repeated: NDArray[Any] = np.broadcast_to(weights, (_BATCH, _LENGTH, *weights.shape)).copy()
    return repeated


def _read_streams(_element: Any) -> InAndOut:
    """Make streams where stream `s` has one number, at index `s`.

    Their products with the matrix, divided by their norm, are row `s` of the matrix.
    """
    weight, gain, constant = (_random(np.float32, rows, _STREAMS + 2, seed=rows + i) for i, rows in enumerate(_ROWS))
    size = np.arange(1, _LENGTH + 1, dtype=np.float32)[None, :, None, None]
    streams = size * np.eye(_STREAMS, _HEAD_DIM, dtype=np.float32)
    weights = np.tanh(weight[:_STREAMS]) * gain + constant
    read = np.zeros((_BATCH, _LENGTH, _HEAD_DIM))
    read[..., :_STREAMS] = size[..., 0] * weights[:, 0]
    mix, beta = _per_token(weights[:, 1:-1]), _per_token(weights[:, -1:])
    return [streams, weight, gain, constant], [read, mix, beta]


def _read_and_norm(element: Any) -> InAndOut:
    """Make the same streams; the read result is scaled by 2 and shifted by 3 after its LayerNorm."""
    inputs, (read, *weights) = _read_streams(element)
    spread = np.sqrt(read.var(axis=-1, keepdims=True) + NORM_EPSILON)
    normal = 2 * (read - read.mean(axis=-1, keepdims=True)) / spread + 3
    scale, shift = (np.full(_HEAD_DIM, value, np.float32) for value in (2, 3))
    return [*inputs, scale, shift], [normal, *weights]


def _mix_and_read(element: Any) -> InAndOut:
    """Make streams that, shifted by one and without a branch's output, equal those of `_read_and_norm`."""
    (streams, *reading), outputs = _read_and_norm(element)
    before = np.roll(streams, -1, axis=2)
    nothing = np.zeros((_BATCH, _LENGTH, _HEAD_DIM), np.float32)
    return [before, _per_token(_SHIFT), _per_token(_BETA), nothing, *reading], [streams, *outputs]


_ROWS = (_HEAD_DIM, _STREAMS, _STREAMS)  # rows of the matrix, of the gain and of the constant
_BETA = np.arange(1, _STREAMS + 1, dtype=np.float32)[:, None]
# Stream t receives the content of stream t - 1.
_SHIFT = np.roll(np.eye(_STREAMS, dtype=np.float32), 1, axis=1)


def _writing() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return streams, β, a branch's output, and what that output adds to each stream."""
    streams = _random(np.float32, _BATCH, _LENGTH, _STREAMS, _HEAD_DIM)
    output = _random(np.float32, _BATCH, _LENGTH, _HEAD_DIM, seed=2)
    return streams, _per_token(_BETA), output, _BETA * output[:, :, None]


def _mix_streams(_element: Any) -> InAndOut:
    streams, beta, output, added = _writing()
    return [streams, _per_token(_SHIFT), beta, output], [np.roll(streams, 1, axis=2) + added]


def _add_to_streams(_element: Any) -> InAndOut:
    streams, beta, output, added = _writing()
    return [streams, beta, output], [streams + added]


def _begin_streams(_element: Any) -> InAndOut:
    streams, beta, output, added = _writing()
    x = streams[:, :, 0]
    return [x, _per_token(_BETA), beta, output], [_BETA * x[:, :, None] + added]


def _end_streams(_element: Any) -> InAndOut:
    streams, beta, output, added = _writing()
    return [streams, _per_token(_SHIFT), beta, output], [(streams + added).sum(axis=2)]


def _rotate(element: Any) -> InAndOut:
    """Rotate by a quarter turn, alternately forwards and backwards: the halves swap, and one changes its sign."""
    x = _random(element, _BATCH, _LENGTH, _HEADS, _HEAD_DIM)
    table = np.zeros((_LENGTH, 1, 2, _HEAD_DIM // 2), element)
    turn = (1 - 2 * (np.arange(_LENGTH) % 2)).astype(element)[:, None, None]
    signs = table + turn[..., None] * np.array([[-1], [1]], element)
    first, second = np.split(x, 2, axis=-1)
    return [x, table, signs], [np.concatenate((-second * turn, first * turn), axis=-1)]


def _rotate_pairs(element: Any) -> InAndOut:
    """Rotate by the same quarter turns: neighbours swap, and one changes its sign."""
    (x, table, signs), _ = _rotate(element)
    turn = signs[:, :, 1, :1]
    first, second = x[..., ::2], x[..., 1::2]
    turned = np.stack((-second * turn, first * turn), axis=-1)
    return [x, *(part.swapaxes(-1, -2).copy() for part in (table, signs))], [turned.reshape(x.shape)]


def _gated(at_1: float) -> Callable[[Any], InAndOut]:
    """Make the inputs of a gate that is 1 everywhere, of an activation that is `at_1` there."""

    def made(element: Any) -> InAndOut:
        value = _random(element, _BATCH, _LENGTH, _HEAD_DIM)
        return [value, np.ones_like(value)], [value.astype(np.float64) * at_1]

    return made


_FUSED: Mapping[str, Callable[[Any], InAndOut]] = {
    "ReadStreams": _read_streams,
    "ReadStreamsNorm": _read_and_norm,
    "MixStreams": _mix_streams,
    "MixReadStreamsNorm": _mix_and_read,
    "AddToStreams": _add_to_streams,
    "BeginStreams": _begin_streams,
    "EndStreams": _end_streams,
    "RotateHeads": _rotate,
    "RotatePairs": _rotate_pairs,
    "GatedGelu": _gated(_PHI_1),
    "GatedGeluTanh": _gated(_GELU_TANH_1),
    "GatedSilu": _gated(1 / (1 + math.exp(-1))),
}
