"""Rotary position embedding at any position, exact to fp32's last digits.

The angle `position · inv_freq` in fp32 is off by 0.03 at a position of a million. Here an angle is counted in turns,
as an integer: with `F_c = round(inv_freq_c / 2π · 2⁴²)` the fraction of a turn is `position · F_c mod 2⁴²`, in which
nothing is rounded but `F` itself. So that no product leaves an int64, the position goes in as
`position = high·2²⁰ + low`, with factors for each: up to 2⁴⁰ positions, off by 2e-6 at most.

A key is rotated once, at its absolute position; a query of a causal window has the same phase
(`exporter/models/parts/rotary.py` says why).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

_TURN = 1 << 42
_LOW = 1 << 20
_TWO_PI = 2 * Fraction("3.14159265358979323846264338327950288419716939937511")


class RotaryPhase(nn.Module):
    """The rotation of a head `[D]` at a position.

    Args:
        dim: head size `D`, even.
    """

    inv_freq: Tensor
    turns_low: Tensor
    turns_high: Tensor
    same: Tensor
    other_half: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.zeros(dim // 2))

    @torch.no_grad()
    def prepare(self) -> None:
        """Turns a token of every channel; the first half turns backwards, which is rotate_half's sign."""
        per_token = [Fraction(float(x)) / _TWO_PI for x in self.inv_freq.double()]
        signed = [-x for x in per_token] + per_token
        for name, step in (("turns_low", 1), ("turns_high", _LOW)):
            self.register_buffer(name, torch.tensor([_fraction(x, step) for x in signed]), persistent=False)
        self.register_buffer("same", torch.eye(len(signed)), persistent=False)
        self.register_buffer("other_half", self.same.roll(len(per_token), dims=0), persistent=False)

    def forward(self, position: Tensor) -> tuple[Tensor]:
        """The rotation at one position `[1]` as a matrix `[D, D]`, `x ↦ x @ matrix`: one product turns all heads."""
        cosine, sine = self._phase(position)
        return (self.same * cosine + self.other_half * sine,)

    def several(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of positions `[C]`, each `[C, D]` fp32."""
        return self._phase(positions.unsqueeze(1))

    def _phase(self, position: Tensor) -> tuple[Tensor, Tensor]:
        turns = (position % _LOW * self.turns_low + _quotient(position, _LOW) * self.turns_high) % _TURN
        angle = turns.float() * (2 * math.pi / _TURN)
        return angle.cos(), angle.sin()


def _quotient(x: Tensor, divisor: int) -> Tensor:
    """Integer division of numbers ≥ 0: one node, where PyTorch's own exports to eight, or goes through fp32."""
    if not torch.onnx.is_in_onnx_export():
        return x // divisor
    quotient: Tensor = torch.onnx.ops.symbolic("Div", [x, torch.tensor(divisor)], dtype=x.dtype, shape=x.shape)
    return quotient


def _fraction(turns: Fraction, step: int) -> int:
    """`turns · step` without its whole turns, in units of a turn / 2⁴²."""
    return round(turns * step % 1 * _TURN) % _TURN


def rotate(x: Tensor, rotation: Sequence[Tensor]) -> Tensor:
    """`[…, C, D]` by a matrix or by cosines and signed sines, in fp32; the result has the dtype of `x`."""
    precise = x.float()
    if len(rotation) == 1:
        return (precise @ rotation[0]).to(x.dtype)
    cosine, sine = rotation
    first, second = precise.chunk(2, dim=-1)
    return (precise * cosine + torch.cat((second, first), dim=-1) * sine).to(x.dtype)
