"""Round a matrix to 4 or 8 bits in blocks: 32 numbers of one column share a scale and a zero point.

    w ≈ scale · (level - zero),   level and zero in 0 … 2^bits - 1

A block's range [min(w, 0), max(w, 0)] is tried whole and shrunk by several factors, because the few numbers that are
then cut off may cost less than coarser levels for all others; the least squared error wins. At the levels that were
chosen, the scale is then the one of least squares, Σ w·(level - zero) / Σ (level - zero)².

`search_weighted` shrinks both ends of a range on their own, and weighs each number's error by how much it matters.

docs/numerics.md has the measured errors, also of symmetric blocks, whose zero is always 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
BITS = 4
# Factors of a block's range.
_SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
_WHOLE = (1.0,)
# Factors for `search_weighted`, which tries all pairs.
_SHRUNK_ENDS = (1.0, 0.9, 0.8, 0.7)
# Columns at a time: the temporaries of a part fit into a processor's cache.
_PART = 1 << 18

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Blocks:
    """A matrix `[K, N]` in blocks along K; the last one of a column is filled up with zeros.

    Args:
        levels: uint8 `[N, blocks, block]`, each below 2^bits.
        scales: fp32 `[N, blocks]`.
        zeros: uint8 `[N, blocks]`, the levels that stand for 0.
        rows: K.
        bits: of a level.
    """

    levels: NDArray[np.uint8]
    scales: Floats
    zeros: NDArray[np.uint8]
    rows: int
    bits: int = BITS

    @property
    def nbytes(self) -> float:
        """Bytes that levels, fp32 scales and zero points take when they are packed."""
        each: float = self.levels.shape[-1] * self.bits / 8 + 4 + self.bits / 8
        return self.scales.size * each

    def matrix(self) -> Floats:
        """Return the rounded matrix, fp32 `[K, N]`."""
        steps = self.levels.astype(np.float32) - self.zeros[..., None]
        flat = (steps * self.scales[..., None]).reshape(len(self.levels), -1)
        return np.ascontiguousarray(flat[:, : self.rows].T)


def round_in_blocks(matrix: Floats, bits: int = BITS, block: int = BLOCK) -> Blocks:
    """Round a matrix `[K, N]` of finite numbers, each as important as any other.

    Args:
        matrix: fp32.
        bits: of a level, 4 or 8; with 8 a block's range is taken whole.
        block: numbers that share a scale and a zero point.
    """
    rows, columns = matrix.shape
    count = -(-rows // block)
    levels = np.empty((columns, count, block), np.uint8)
    scales, zeros = np.empty((columns, count), np.float32), np.empty((columns, count), np.uint8)
    many = max(1, _PART // (count * block))
    for start in range(0, columns, many):
        part = slice(start, start + many)
        blocks = np.zeros((len(levels[part]), count * block), np.float32)
        blocks[:, :rows] = matrix[:, part].T
        levels[part], scales[part], zeros[part] = _round(
            blocks.reshape(-1, count, block), (1 << bits) - 1, _SHRUNK if bits == BITS else _WHOLE
        )
    return Blocks(levels, scales, zeros, rows, bits)


def _round(blocks: Floats, most: int, factors: Sequence[float]) -> tuple[Floats, Floats, Floats]:
    """Return levels, scales and zeros of blocks `[…, block]` for the best range among those shrunk by these factors."""
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    best = _tried(blocks, *_of_range(low, high, most), most)
    for factor in factors[1:]:
        best = _better(best, _tried(blocks, *_of_range(low * factor, high * factor, most), most))
    _, levels, _, zeros = best
    steps = levels - zeros[..., None]
    squares = (steps * steps).sum(-1)
    fitted = (steps * blocks).sum(-1) / np.where(squares > 0, squares, 1)
    _, levels, scales, zeros = _better(best, _tried(blocks, np.where(squares > 0, fitted, best[2]), zeros, most))
    return levels, scales, zeros


def round_for_head(table: Floats, importance: Floats, bits: int, block: int) -> Blocks:
    """Round a table `[tokens, K]` along K, for a head that multiplies what has these mean squares by it.

    Args:
        table: fp32.
        importance: fp32 `[K]`, how much the error of each column matters.
        bits: of a level.
        block: numbers that share a scale and a zero point; it divides K.
    """
    tokens, rows = table.shape
    count, most = rows // block, (1 << bits) - 1
    matters = (importance / max(float(importance.mean()), 1e-30) + 1e-2).astype(np.float32)
    levels = np.empty((tokens, count, block), np.uint8)
    scales, zeros = np.empty((tokens, count), np.float32), np.empty((tokens, count), np.uint8)
    for start in range(0, tokens, _PART // block):
        part = slice(start, start + _PART // block)
        for place in range(count):
            inside = slice(place * block, (place + 1) * block)
            numbers = np.ascontiguousarray(table[part, inside])
            scale, zero = search_weighted(numbers.T, matters[inside], bits)
            levels[part, place] = np.clip(np.rint(numbers / scale[:, None] + zero[:, None]), 0, most)
            scales[part, place], zeros[part, place] = scale, zero
    return Blocks(levels, scales, zeros, rows, bits)


def search_weighted(block: Floats, importance: Floats, bits: int) -> tuple[Floats, Floats]:
    """Return the scale and zero point of least weighted squared error for each column, both fp32 `[N]`.

    Args:
        block: fp32 `[rows, N]`, numbers that share a scale.
        importance: fp32 `[rows]`, the weight of each row's error.
        bits: of a level.
    """
    numbers, most = np.ascontiguousarray(block.T), (1 << bits) - 1
    low, high = np.minimum(numbers.min(-1), 0), np.maximum(numbers.max(-1), 0)
    best: tuple[Floats, Floats, Floats] | None = None
    for down in _SHRUNK_ENDS:
        for up in _SHRUNK_ENDS:
            scales, zeros = _of_range(low * np.float32(down), high * np.float32(up), most)
            levels = np.clip(np.rint(numbers / scales[:, None] + zeros[:, None]), 0, most)
            errors = (levels - zeros[:, None]) * scales[:, None] - numbers
            found = np.square(errors, out=errors) @ importance
            if best is None:
                best = found, scales, zeros
            else:
                less = found < best[0]
                errors_now, scales_now, zeros_now = best
                best = (
                    np.where(less, found, errors_now),
                    np.where(less, scales, scales_now),
                    np.where(less, zeros, zeros_now),
                )
    assert best is not None
    return best[1], best[2]


def _of_range(low: Floats, high: Floats, most: int) -> tuple[Floats, Floats]:
    """Return scales and zeros whose levels reach from `low` ≤ 0 to `high` ≥ 0; for a block of zeros, 1 and 0."""
    scales = (high - low) / np.float32(most)
    scales = np.where(scales > np.finfo(np.float32).tiny, scales, np.float32(1))
    return scales, np.clip(np.rint(-low / scales), 0, most)


def _tried(blocks: Floats, scales: Floats, zeros: Floats, most: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return squared errors, levels, scales and zeros."""
    scales = np.where(scales > np.finfo(np.float32).tiny, scales, np.float32(1)).astype(np.float32)
    levels = np.clip(np.rint(blocks / scales[..., None] + zeros[..., None]), 0, most)
    errors = (levels - zeros[..., None]) * scales[..., None] - blocks
    return (errors * errors).sum(-1), levels, scales, zeros


def _better(
    first: tuple[Floats, Floats, Floats, Floats], second: tuple[Floats, Floats, Floats, Floats]
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return for each block the rounding with less error, the first if equal."""
    taken = second[0] < first[0]
    levels = np.where(taken[..., None], second[1], first[1])
    errors, scales, zeros = (np.where(taken, second[i], first[i]) for i in (0, 2, 3))
    return errors, levels, scales, zeros
