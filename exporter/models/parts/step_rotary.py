"""Rotary position embedding at any position, exact to fp32's last digits, without a wide integer, cosine or sine.

The angle `position · inv_freq` in fp32 is off by 0.03 at a position of a million. An exact product of integers does not
fit 32 bits, in which many runtimes compute int64, and a GPU's cosine may be off by 2⁻¹¹ (WGSL, accuracy of its built-in
functions). So the graph reads cosines and sines from tables that are computed in fp64 at export:

- if the model has a last position, from a row for each position;
- else from a row for each value of a digit: the angles of the digits of `p = Σ dₖ·256ᵏ` add up to that of `p`, so their
  rotations are multiplied, each as a matrix `[[cos, -sin], [sin, cos]]`. With four digits fp32 is off by 1e-6 at most.

Some runtimes divide integers in fp32, which is exact up to 2²⁴ (OpenVINO 2026.4, CPU; it adds and multiplies int32
exactly). The quotient of a large position is then a little off. The rest after subtracting its multiple is small,
though perhaps negative, and the remainder of this rest is exact.

A key is rotated once, at its absolute position; a query of a causal window has the same phase
(`exporter/models/parts/rotary.py` says why).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ....core.limits import LARGEST_SIZE
from . import fused_calls

_BASE = 256
# The last digit is the rest (`left_over`): from -128 on, where negative digits index from the table's end.
_LAST = 2 * _BASE


class RotaryPhase(nn.Module):
    """The rotation of a head `[D]` at a position.

    Args:
        dim: head size `D`, even.
        positions: number of positions; None for 2³¹.

    Attributes:
        cosine: cosines of every position, `[P, D/2]`; with digits the upper row of the highest digit's matrix,
            `[129, 2, 1, 1, D/2]`.
        sine: sines of every position, or the lower row.
        lower_0 …: matrices of the lower digits, `[256, 2, 2, 1, D/2]` and `[256, 1, 2, 2, D/2]`, and for the last digit
            the vector `(cos, sin)`, `[512, 1, 1, 2, D/2]`. Each shares an axis with the next one, over which the
            product of matrices sums.
    """

    inv_freq: Tensor
    cosine: Tensor
    sine: Tensor
    places: Tensor
    radices: Tensor
    same: Tensor
    other_half: Tensor

    def __init__(self, dim: int, positions: int | None = None) -> None:
        super().__init__()
        self.positions = positions
        self.register_buffer("inv_freq", torch.zeros(dim // 2))

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the tables, in fp64 from `inv_freq` as loaded."""
        last = torch.cat((torch.arange(_LAST - 128), torch.arange(-128, 0)))
        upper = [torch.arange(n) * _BASE**k for k, n in ((3, 129), (2, _BASE), (1, _BASE))]
        digits = [*upper, last] if self.positions is None else [torch.arange(self.positions)]
        (cosine, sine), *lower = [self._turned(digit) for digit in digits]
        tables = {"cosine": cosine, "sine": sine}
        if lower:
            axes = len(lower)
            tables = {
                "cosine": _at(torch.stack((cosine, -sine), dim=1), 0, axes),
                "sine": _at(torch.stack((sine, cosine), dim=1), 0, axes),
                f"lower_{axes - 1}": _at(torch.stack(lower[-1], dim=1), axes - 1, axes),
            }
            for k, (c, s) in enumerate(lower[:-1]):
                matrix = torch.stack((torch.stack((c, -s), dim=1), torch.stack((s, c), dim=1)), dim=1)
                tables[f"lower_{k}"] = _at(matrix, k, axes)
            tables |= {
                "places": torch.tensor([_BASE**2, _BASE, 1]),
                "radices": torch.tensor([LARGEST_SIZE, _BASE, _BASE]),
            }
        half = len(self.inv_freq)
        sign = torch.tensor([-1.0, 1.0]).repeat_interleave(half)  # rotate_half's sign
        tables["same"] = torch.eye(2 * half)
        tables["other_half"] = tables["same"].roll(half, dims=0) * sign
        for name, table in tables.items():
            table = table.float() if table.is_floating_point() else table
            self.register_buffer(name, table, persistent=False)

    def _turned(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines of the angles at positions `tokens [n]`, each `[n, D/2]` fp64."""
        # Exact, because a digit or a position with a row has at most 29 bits, and a frequency 24.
        angle = tokens.double()[:, None] * self.inv_freq.double()
        return angle.cos(), angle.sin()

    def forward(self, position: Tensor) -> tuple[Tensor]:
        """Return the rotation at a position `[1]` as a matrix `[D, D]`, `x ↦ x @ matrix`, one product for all heads."""
        cosine, sine = (torch.cat((x, x), dim=1) for x in self._phase(position))
        return (self.same * cosine + self.other_half * sine,)

    def several(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of positions `[C]`, each `[C, 2, D/2]` fp32."""
        cosine, sine = self._phase(positions)
        return torch.stack((cosine, cosine), dim=1), torch.stack((-sine, sine), dim=1)

    def _phase(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions `[C]`, each `[C, D/2]`."""
        if self.positions is not None:
            return rows_of(self.cosine, positions), rows_of(self.sine, positions)
        highest, *others = self._digits(positions)
        lower = [rows_of(getattr(self, f"lower_{k}"), digit) for k, digit in enumerate(others)]
        product = lower[0]
        for factor in lower[1:]:
            product = product * factor
        shared = tuple(range(1, product.dim() - 1))
        cosine, sine = ((rows_of(table, highest) * product).sum(dim=shared) for table in (self.cosine, self.sine))
        return cosine, sine

    def _digits(self, positions: Tensor) -> Sequence[Tensor]:
        """Compute the digits of positions `[C]`, the highest first, each `[C]`."""
        above = quotient(positions, torch.tensor(_BASE))
        last = left_over(positions, _BASE) % _LAST
        places, radices = self.places, self.radices
        if len(positions) > 1:
            places, radices = places.unsqueeze(1), radices.unsqueeze(1)
        upper = torch.split((quotient(above, places) % radices).flatten(), len(positions))
        return (*upper, last)


def _at(factor: Tensor, axis: int, axes: int) -> Tensor:
    """Reshape `[rows, 2, D/2]` or `[rows, 2, 2, D/2]` so that its middle axes are at `axis` of `axes` middle axes."""
    rows, *own, half = factor.shape
    return factor.reshape(rows, *[1] * axis, *own, *[1] * (axes - axis - len(own)), half)


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """Return rows `[C]` of a table with one node, where PyTorch's indexing exports to two.

    Raises:
        IndexError: there is no such row; in a file the runtime raises its own error.
    """
    if not torch.onnx.is_in_onnx_export():
        return torch.index_select(table, 0, index)
    shape = (*index.shape, *table.shape[1:])
    found: Tensor = torch.onnx.ops.symbolic("Gather", [table, index], {"axis": 0}, dtype=table.dtype, shape=shape)
    return found


def rotate(x: Tensor, rotation: Sequence[Tensor]) -> Tensor:
    """Rotate `[B, H, C, D]` by a matrix or by cosines and signed sines, in fp32; the result has the dtype of `x`."""
    precise = x.float()
    if len(rotation) == 1:
        return (precise @ rotation[0]).to(x.dtype)
    return fused_calls.rotate(precise, *rotation).to(x.dtype)


def quotient(x: Tensor, divisor: Tensor) -> Tensor:
    """Divide integers ≥ 0 with one node, where PyTorch's division exports to eight, or goes through fp32."""
    if not torch.onnx.is_in_onnx_export():
        return x // divisor
    shape = np.broadcast_shapes(x.shape, divisor.shape)
    found: Tensor = torch.onnx.ops.symbolic("Div", [x, divisor], dtype=x.dtype, shape=shape)
    return found


def far_remainder(position: Tensor, divisor: int) -> Tensor:
    """Compute `position % divisor` for any position."""
    return left_over(position, divisor) % divisor


def left_over(position: Tensor, divisor: int) -> Tensor:
    """Subtract the largest multiple of the divisor from `position`; with Div in fp32 from -128 to `divisor + 128`."""
    return position - quotient(position, torch.tensor(divisor)) * divisor
