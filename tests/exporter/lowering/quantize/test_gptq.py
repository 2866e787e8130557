"""Rounding for the inputs that a layer meets: against the textbook's loop, and against rounding to nearest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localattn.exporter.lowering.quantize.blocks import BLOCK, round_in_blocks, search_weighted
from localattn.exporter.lowering.quantize.gptq import round_for_inputs


def inputs(rows: int, seed: int = 0) -> np.ndarray:
    """Correlated inputs `[4096, rows]` of which a few are large, as in trained models."""
    generator = np.random.default_rng(seed)
    mixed = generator.standard_normal((4096, rows)) @ (np.eye(rows) + 0.3 * generator.standard_normal((rows, rows)))
    return mixed * np.where(np.arange(rows) % 17 == 3, 20.0, 1.0)


def moments(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.T @ x / len(x))


def product_error(matrix: np.ndarray, rounded: np.ndarray, h: torch.Tensor) -> float:
    """‖X(W - Q)‖² relative to ‖XW‖²."""
    whole, error = matrix.astype(np.float64), (rounded - matrix).astype(np.float64)
    squares = [float(((h.double().numpy() @ x) * x).sum()) for x in (error, whole)]
    return squares[0] / squares[1]


def naive_gptq(matrix: np.ndarray, h: torch.Tensor, bits: int) -> np.ndarray:
    """Algorithm 1 in float64, every later row corrected at once."""
    left = matrix.astype(np.float64)
    damped = h.double().numpy() + 0.01 * np.eye(len(h)) * h.double().diagonal().mean().numpy()
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T
    importance = h.double().diagonal().numpy()
    importance = (importance / importance.mean() + 1e-6).astype(np.float32)
    rounded = np.empty_like(left)
    for k in range(len(left)):
        if k % BLOCK == 0:
            block = slice(k, min(k + BLOCK, len(left)))
            scale, zero = search_weighted(left[block].astype(np.float32), importance[block], bits)
        level = np.clip(np.rint(left[k] / scale + zero), 0, 2**bits - 1)
        rounded[k] = (level - zero) * scale
        left[k + 1 :] -= np.outer(factor[k, k + 1 :], (left[k] - rounded[k]) / factor[k, k])
    return rounded


@pytest.mark.parametrize(("rows", "bits"), [(64, 4), (70, 4), (96, 8)])
def test_it_is_the_textbooks_loop(rows: int, bits: int) -> None:
    matrix = np.random.default_rng(1).standard_normal((rows, 24)).astype(np.float32)
    h = moments(inputs(rows))
    made, naive = round_for_inputs(matrix, h, bits), naive_gptq(matrix, h, bits)
    assert made.levels.max() < 2**bits and made.bits == bits
    # In fp32 a number between two levels may fall to the other side; that moves no error by more than a little.
    assert (np.abs(made.matrix() - naive) < 1e-5).mean() > 0.98
    assert product_error(matrix, made.matrix(), h) == pytest.approx(
        product_error(matrix, naive.astype(np.float32), h), rel=0.03
    )


def test_products_err_less_than_by_the_nearest_level() -> None:
    matrix = np.random.default_rng(2).standard_normal((256, 64)).astype(np.float32)
    h = moments(inputs(256))
    nearest, ours = (
        product_error(matrix, made.matrix(), h) for made in (round_in_blocks(matrix), round_for_inputs(matrix, h, 4))
    )
    assert ours < 0.5 * nearest


def test_the_search_finds_what_a_fine_grid_finds() -> None:
    generator = np.random.default_rng(3)
    block, importance = generator.standard_normal((BLOCK, 5)).astype(np.float32), np.ones(BLOCK, np.float32)
    importance[4] = 400.0
    scale, zero = search_weighted(block, importance, 4)
    for column in range(5):
        x = block[:, column]
        span, best = x.max() - x.min(), np.inf
        for s in span / 15 * np.linspace(0.5, 1.1, 121):
            for z in range(16):
                error = (np.clip(np.rint(x / s + z), 0, 15) - z) * s - x
                best = min(best, float((importance * error**2).sum()))
        error = (np.clip(np.rint(x / scale[column] + zero[column]), 0, 15) - zero[column]) * scale[column] - x
        assert float((importance * error**2).sum()) < 2.5 * best


@pytest.mark.parametrize("rows", [32, 40])
def test_inputs_that_never_came_and_constant_matrices_are_no_fault(rows: int) -> None:
    matrix = np.random.default_rng(4).standard_normal((rows, 8)).astype(np.float32)
    x = inputs(rows)
    x[:, :7] = 0
    for h in (moments(x), torch.zeros(rows, rows), moments(np.ones((9, rows)))):
        assert np.abs(round_for_inputs(matrix, h, 4).matrix() - matrix).max() < 3
    assert np.allclose(round_for_inputs(np.zeros((rows, 8), np.float32), moments(x), 4).matrix(), 0)
