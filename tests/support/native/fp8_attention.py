"""Attention in fp8 (E4M3), plainly in float64: what kernels of fp8 must give, rounding by rounding.

Query, key and value are quantised with one scale each (`quantised`). The weights are rounded too, 2⁸ times as large as
they are relative to the largest score met so far: so the result depends on the order in which keys are met, tile by
tile, which is the kernel's (`plugins/kernel/windowed_attention.py`). Nothing else is rounded.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from localattn.core.nodes.attention import HEADS_FIRST
from localattn.plugins.kernel.spec import Tile

from .. import reference
from .kernel_cases import Case

Floats = NDArray[np.float64]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0
WEIGHTS = 2.0**8


def to_e4m3(x: Floats) -> Floats:
    """The nearest numbers of E4M3 (OCP 8-bit floating point): of two the even one, at most ±448."""
    size = np.abs(np.asarray(x, np.float64))
    _, exponent = np.frexp(size)  # size = m·2^exponent with m in [½, 1)
    step = 2.0 ** (np.clip(exponent - 1, -6, 8) - 3)  # three binary digits behind the first; subnormal below 2⁻⁶
    return np.copysign(np.minimum(np.rint(size / step) * step, LARGEST), x)


def quantised(x: Floats, scale: float) -> Floats:
    """The numbers of E4M3 that stand for `x / scale`, as ONNX's QuantizeLinear makes them."""
    return to_e4m3(np.asarray(x, np.float64) / scale)


def to_half_and_e4m3(x: Floats) -> Floats:
    """By way of fp16, cut off: what Triton makes for GPUs of compute capability 8.9, from fp32."""
    _, exponent = np.frexp(x)
    step = 2.0 ** (np.maximum(exponent - 1, -14) - 10)
    return to_e4m3(np.floor(x / step) * step)


def visibility(case: Case) -> NDArray[np.bool_]:
    """Which keys each query sees but for the mask, `[N, N]`."""
    if case.geometry.sees_all:
        every = np.ones((case.length, case.length), bool)
        return np.tril(every) if case.geometry.causal else every
    return reference.upstream_visibility(case.geometry, case.length)


def attention(
    case: Case, query: Floats, key: Floats, value: Floats, mask: NDArray[np.bool_] | None, tile: Tile, *, half: bool
) -> Floats:
    """What a kernel with this tile gives for numbers of E4M3, in the layout of `case.perm`.

    Args:
        case: window, scale and layout.
        query: numbers of E4M3.
        key: as query, with its own number of heads.
        value: as key.
        mask: `[B, N]`, false where a key is hidden.
        tile: how the kernel cuts the work.
        half: weights are rounded by way of fp16.
    """
    q, k, v = (x.transpose(case.perm) for x in (query, key, value))
    visible, output = visibility(case), np.zeros(q.shape)
    for b, h in np.ndindex(q.shape[:2]):
        hidden = np.zeros(case.length, bool) if mask is None else ~mask[b]
        kv = h * k.shape[1] // q.shape[1]
        scores = case.attributes.scale * np.log2(np.e) * (q[b, h] @ k[b, kv].T)
        scores = np.where(visible & ~hidden, scores, -np.inf)
        for start in range(0, case.length, tile.block_queries):
            rows = slice(start, start + tile.block_queries)
            output[b, h, rows] = _rows(scores[rows], visible[rows], v[b, kv], tile.block_keys, half=half)
    return output if case.perm == HEADS_FIRST else output.transpose(0, 2, 1, 3)


def _rows(scores: Floats, visible: NDArray[np.bool_], value: Floats, keys: int, *, half: bool) -> Floats:
    """The output of one block of queries: first over the tiles of keys that only some of them see, then the others."""
    first, end = visible.argmax(1).min(), visible.shape[1] - visible[:, ::-1].argmax(1).min()
    tiles = [np.arange(s, min(s + keys, visible.shape[1])) for s in range(first, end, keys)]
    tiles.sort(key=lambda tile: len(tile) == keys and bool(visible[:, tile].all()))
    top, total, sums = np.full(len(scores), -1e30), np.zeros(len(scores)), np.zeros((len(scores), value.shape[1]))
    for tile in tiles:
        higher = np.maximum(top, scores[:, tile].max(1))
        weights = WEIGHTS * np.exp2(scores[:, tile] - higher[:, None])
        shrink = np.exp2(top - higher)
        rounded = to_half_and_e4m3(weights) if half else to_e4m3(weights)
        total, sums = total * shrink + weights.sum(1), sums * shrink[:, None] + rounded @ value[tile]
        top = higher
    return sums / np.where(total == 0, 1, total)[:, None]
