"""Round a matrix to 4 bits in blocks: 32 numbers of one column share a scale and a zero point.

    w ≈ scale · (level - zero),   level and zero in 0 … 15

A block's range [min(w, 0), max(w, 0)] is tried whole and shrunk by several factors, because the few numbers that are
then cut off may cost less than coarser levels for all others; the least squared error wins. At the levels that were
chosen, the scale is then the one of least squares, Σ w·(level - zero) / Σ (level - zero)².

docs/numerics.md has the measured errors, also of symmetric blocks, whose zero is always 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
LEVELS = 16
# Factors of a block's range.
_SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
# Columns at a time: the temporaries of a part fit into a processor's cache.
_PART = 1 << 18

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Blocks:
    """A matrix `[K, N]` in blocks of `BLOCK` along K; the last one of a column is filled up with zeros.

    Args:
        levels: uint8 `[N, blocks, BLOCK]`, each below `LEVELS`.
        scales: fp32 `[N, blocks]`.
        zeros: uint8 `[N, blocks]`, the levels that stand for 0.
        rows: K.
    """

    levels: NDArray[np.uint8]
    scales: Floats
    zeros: NDArray[np.uint8]
    rows: int

    def matrix(self) -> Floats:
        """Return the rounded matrix, fp32 `[K, N]`."""
        steps = self.levels.astype(np.float32) - self.zeros[..., None]
        flat = (steps * self.scales[..., None]).reshape(len(self.levels), -1)
        return np.ascontiguousarray(flat[:, : self.rows].T)


def round_in_blocks(matrix: Floats) -> Blocks:
    """Round a matrix `[K, N]` of finite numbers."""
    rows, columns = matrix.shape
    count = -(-rows // BLOCK)
    levels = np.empty((columns, count, BLOCK), np.uint8)
    scales, zeros = np.empty((columns, count), np.float32), np.empty((columns, count), np.uint8)
    many = max(1, _PART // (count * BLOCK))
    for start in range(0, columns, many):
        part = slice(start, start + many)
        blocks = np.zeros((len(levels[part]), count * BLOCK), np.float32)
        blocks[:, :rows] = matrix[:, part].T
        levels[part], scales[part], zeros[part] = _round(blocks.reshape(-1, count, BLOCK))
    return Blocks(levels, scales, zeros, rows)


def _round(blocks: Floats) -> tuple[Floats, Floats, Floats]:
    """Return levels, scales and zeros of blocks `[…, BLOCK]`."""
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    best = _tried(blocks, *_of_range(low, high))
    for factor in _SHRUNK[1:]:
        best = _better(best, _tried(blocks, *_of_range(low * factor, high * factor)))
    _, levels, _, zeros = best
    steps = levels - zeros[..., None]
    squares = (steps * steps).sum(-1)
    fitted = (steps * blocks).sum(-1) / np.where(squares > 0, squares, 1)
    _, levels, scales, zeros = _better(best, _tried(blocks, np.where(squares > 0, fitted, best[2]), zeros))
    return levels, scales, zeros


def _of_range(low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """Return scales and zeros whose levels reach from `low` ≤ 0 to `high` ≥ 0; of a block of zeros 1 and 0."""
    scales = (high - low) / np.float32(LEVELS - 1)
    scales = np.where(scales > np.finfo(np.float32).tiny, scales, np.float32(1))
    return scales, np.clip(np.rint(-low / scales), 0, LEVELS - 1)


def _tried(blocks: Floats, scales: Floats, zeros: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return squared errors, levels, scales and zeros."""
    scales = np.where(scales > np.finfo(np.float32).tiny, scales, np.float32(1)).astype(np.float32)
    levels = np.clip(np.rint(blocks / scales[..., None] + zeros[..., None]), 0, LEVELS - 1)
    errors = (levels - zeros[..., None]) * scales[..., None] - blocks
    return (errors * errors).sum(-1), levels, scales, zeros


def _better(
    first: tuple[Floats, Floats, Floats, Floats], second: tuple[Floats, Floats, Floats, Floats]
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return for each block the one of less error, the first among equals."""
    taken = second[0] < first[0]
    levels = np.where(taken[..., None], second[1], first[1])
    errors, scales, zeros = (np.where(taken, second[i], first[i]) for i in (0, 2, 3))
    return errors, levels, scales, zeros
