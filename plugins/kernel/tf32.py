"""Rounding to TF32, for products on tensor cores of numbers that leave fp16's range."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (Triton reads annotations as its own.)

from __future__ import annotations

import triton
import triton.language as tl

# Half of TF32's last bit, and the bits of fp32 that TF32 has: products cut the others off.
_HALF_A_BIT = tl.constexpr(0x1000)
_TF32_BITS = tl.constexpr(-0x2000)


@triton.jit
def rounded(x):
    """fp32 numbers with TF32's digits."""
    return ((x.to(tl.int32, bitcast=True) + _HALF_A_BIT) & _TF32_BITS).to(tl.float32, bitcast=True)
