"""Is the kernel right on this GPU? Every kind of window with every option, in each of its ways, before it is timed.

The judge is the operator's plain reference in float64, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, LOWEST_BIAS, SEQUENCE_FIRST, NodeAttributes
from localattn.plugins.torch_op import windowed_attention

from .ours import WAYS, Call

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Outputs are averages of values of size 1; weights are rounded to the input's type before the second product.
TOLERANCES = {"fp16": 3e-3, "bf16": 2e-2, "fp32": 1e-5}
WINDOWS = (
    WindowGeometry(40, 1, 0, causal=True, exact_windowsize=True),
    WindowGeometry(64, 2, 0, causal=True),
    WindowGeometry(33, 1, 2, exact_windowsize=True),
    WindowGeometry(128, 1, 1),
    WindowGeometry(256, 0, 0),
)
BATCH, HEADS = 2, 3


@dataclass(frozen=True)
class Check:
    """One call that must be right."""

    geometry: WindowGeometry
    length: int
    head_dim: int
    dtype: str
    mask: bool
    bias: bool
    shared_qk: bool
    perm: tuple[int, ...]

    def describe(self) -> str:
        """For the report."""
        flags = [name for name in ("mask", "bias", "shared_qk") if getattr(self, name)]
        layout = "[B, N, H, D]" if self.perm == SEQUENCE_FIRST else "[B, H, N, D]"
        extra = "".join(f", {flag}" for flag in flags)
        return f"{self.geometry.describe()}, n {self.length}, d {self.head_dim}, {self.dtype}, {layout}{extra}"

    @property
    def attributes(self) -> NodeAttributes:
        """The node."""
        scale = (-1.0 if self.shared_qk else 1.0) * self.head_dim**-0.5
        return NodeAttributes(self.geometry, scale, shared_qk=self.shared_qk, perm=self.perm)

    def call(self) -> Call:
        """On the CPU: a mask that hides a sequence's first half, a bias with whole rows of -inf."""
        generator = torch.Generator().manual_seed(self.length)
        dtype = DTYPES[self.dtype]
        shape = [(BATCH, HEADS, self.length, self.head_dim)[axis] for axis in self.perm]
        query, key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
        mask = bias = None
        if self.mask:
            mask = torch.rand(BATCH, self.length, generator=generator) > 0.3
            mask[0, : self.length // 2] = False
        if self.bias:
            g = self.geometry
            bias = torch.randn(HEADS, g.window_size, g.keys_per_window, generator=generator).to(dtype)
            bias[0, 0] = -torch.inf
        return Call(self.attributes, query, key, value, mask, bias)


def checks() -> Iterator[Check]:
    """Every type, optional input and some head sizes, each with every window; lengths around tiles and windows."""
    options = (
        ("fp16", 64, False, False),
        ("fp16", 64, True, True),
        ("bf16", 64, True, False),
        ("bf16", 128, False, True),
        ("fp16", 128, True, False),
        ("fp16", 40, False, True),
        ("bf16", 256, False, False),
        ("fp32", 64, True, True),
        ("fp32", 128, False, False),
        ("fp16", 16, True, False),
    )
    for row, (dtype, head_dim, mask, bias) in enumerate(options):
        for column, geometry in enumerate(WINDOWS):
            number = row + column
            length = (1, 63, 64, 65, 129, 500, 1000)[number % 7]
            perm = (SEQUENCE_FIRST, HEADS_FIRST)[number % 2]
            yield Check(geometry, length, head_dim, dtype, mask, bias, number % 3 == 0, perm)


def expected(call: Call) -> Tensor:
    """What is right, in float64 on the CPU."""
    a, g = call.attributes, call.attributes.geometry
    bias = None if call.attn_bias is None else call.attn_bias.double().clamp_min(LOWEST_BIAS)
    tensors = (x.double() for x in (call.query, call.key, call.value))
    window = g.window_size, g.look_backward, g.look_forward, g.causal, g.exact_windowsize
    result: Tensor = windowed_attention(
        *tensors, call.key_mask, bias, *window, a.scale, a.shared_qk, a.perm == SEQUENCE_FIRST, a.xpos_scale_base
    )
    return result


def run_check(check: Check, ways: Sequence[str] = tuple(WAYS), device: str = "cuda") -> dict[str, Any]:
    """The largest error of each way, or why it failed; `agrees` says whether all is well."""
    call = check.call()
    exact = expected(call)
    tensors = (call.query, call.key, call.value, call.key_mask, call.attn_bias)
    there = Call(call.attributes, *(None if x is None else x.to(device) for x in tensors))  # type: ignore[arg-type]
    errors: dict[str, float | str] = {}
    for name in ways:
        try:
            difference = (WAYS[name](there)().double().cpu() - exact).abs()
            errors[name] = float(difference.nan_to_num(torch.inf).max())
        except Exception as error:  # whatever fails is a result
            errors[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    agrees = all(isinstance(error, float) and error <= TOLERANCES[check.dtype] for error in errors.values())
    finite = {name: error if error != torch.inf else "not finite" for name, error in errors.items()}
    return {"what": check.describe(), "errors": finite, "agrees": agrees}
