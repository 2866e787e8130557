"""Round a matrix to blocks so that its products change least on realistic inputs (GPTQ).

With X the inputs of a layer and H = XᵀX / n their second moments, the rounded matrix Q is to make the error of the
products small, not that of the weights:

    ‖X(W - Q)‖² / n = tr((W - Q)ᵀ H (W - Q))

Rows of W are rounded one after another. What rounding row k gets wrong is corrected in all later rows, by the upper
Cholesky factor U of H⁻¹:  W[j] -= (W[k] - Q[k]) · U[k, j] / U[k, k],  j > k.  A block's scale and zero point are
searched when its first row is reached, on the rows as they are corrected until then, each weighted by H[k, k].

Source: Frantar et al., GPTQ, 2022, algorithm 1. `naive_gptq` of its test is the same without blocks of updates.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .blocks import BLOCK, Blocks, Floats, search_weighted

# Fraction of the diagonal's mean that is added to it, so that unused directions do not blow up the inverse.
_DAMPING = 0.01


def round_for_inputs(matrix: Floats, moments: Tensor, bits: int, block: int = BLOCK) -> Blocks:
    """Round a matrix `[K, N]` of finite numbers for inputs with second moments `[K, K]`.

    Args:
        matrix: fp32 `[K, N]`.
        moments: fp32 or fp64 `[K, K]`, the mean of x·xᵀ; zeros where no input was seen.
        bits: of a level, 4 or 8.
        block: rows that share a scale and a zero point.
    """
    rows, columns = matrix.shape
    count = -(-rows // block)
    factor = _inverse_factor(moments)
    sizes = moments.diagonal().double()
    importance = (sizes / sizes.mean().clamp_min(1e-30) + 1e-6).float().numpy()
    left = torch.from_numpy(np.array(matrix, np.float32))
    levels = np.zeros((columns, count, block), np.uint8)
    scales, zeros = np.empty((columns, count), np.float32), np.empty((columns, count), np.uint8)
    for place in range(count):
        first, end = place * block, min((place + 1) * block, rows)
        inside = left[first:end]
        scale, zero = search_weighted(inside.numpy(), importance[first:end], bits)
        scales[:, place], zeros[:, place] = scale, zero
        levels[:, place] = zero[:, None]  # beyond the last row
        errors = torch.empty_like(inside)
        for k in range(first, end):
            row = left[k].numpy()
            level = np.clip(np.rint(row / scale + zero), 0, (1 << bits) - 1)
            levels[:, place, k - first] = level
            errors[k - first] = (left[k] - torch.from_numpy((level - zero) * scale)) / factor[k, k]
            left[k + 1 : end] -= torch.outer(factor[k, k + 1 : end], errors[k - first])
        left[end:] -= factor[first:end, end:].T @ errors
    return Blocks(levels, scales, zeros, rows, bits)


def _inverse_factor(moments: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse, fp32 `[K, K]`; increase the damping until it exists."""
    h = moments.double()
    mean = h.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    for damping in (_DAMPING * 10.0**power for power in range(8)):
        damped = h + torch.eye(len(h), dtype=torch.float64) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                factor: Tensor = upper.float()
                return factor
    return torch.eye(len(h))  # moments without an inverse: no row corrects another
