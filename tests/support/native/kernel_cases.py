"""Calls of the attention kernel, drawn over every kind of window, with the numbers that are right.

Whatever runs the kernel, as source in Triton's interpreter or compiled, is judged by these.
"""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, LOWEST_BIAS, SEQUENCE_FIRST, NodeAttributes
from localattn.core.nodes.gpu import KernelAttributes
from localattn.core.nodes.grouped import GroupedAttributes
from localattn.plugins.kernel.spec import Fp32Products, KernelSpec, Tile

from .. import reference

# Those of every kernel; fp8's take few options, and have tests of their own.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Outputs are averages of values of size 1; weights are rounded to the input's type before the second product. The same
# number is what larger values may differ by in proportion: averages of few keys are as large as their largest.
TOLERANCE = {"fp32": 4e-6, "fp16": 2e-3, "bf16": 2e-2, "fp8": 6e-2}
# How much larger the scores of a case with a cap are, and with them what rounding makes of them.
LARGE = 4
# Below the windows, so that all kinds of tiles occur.
SMALL_TILE = Tile(16, 16, 4, 2)


@dataclass(frozen=True)
class Case:
    """One call of the kernel."""

    geometry: WindowGeometry
    length: int
    head_dim: int = 16
    dtype: str = "fp32"
    batch: int = 1
    heads: int = 2
    mask: bool = False
    bias: bool = False
    shared_qk: bool = False
    perm: tuple[int, ...] = SEQUENCE_FIRST
    scale: float | None = None
    tile: Tile = SMALL_TILE
    xpos: float = 0.0  # base of the decay
    group: int = 1  # heads of queries for each of keys
    softcap: float = 0.0
    sinks: bool = False
    fp32_products: Fp32Products = "ieee"

    @property
    def grouped(self) -> bool:
        """Whether only the grouped nodes can have this."""
        return bool(self.group > 1 or self.softcap or self.sinks or self.geometry.sees_all)

    @property
    def attributes(self) -> KernelAttributes:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        if self.grouped:
            return GroupedAttributes(self.geometry, scale, self.softcap, perm=self.perm)
        return NodeAttributes(self.geometry, scale, shared_qk=self.shared_qk, perm=self.perm, xpos_scale_base=self.xpos)

    @property
    def spec(self) -> KernelSpec:
        options = (self.mask, self.bias, bool(self.xpos), bool(self.softcap), self.sinks)
        return KernelSpec(self.dtype, self.head_dim, *options, self.shared_qk, self.fp32_products)

    def tensors(self, size: float = 1.0) -> tuple[torch.Tensor | None, ...]:
        """Query, key, value, mask and bias, then sinks if there are any.

        The mask hides long stretches, the bias has -inf and a row of it.
        """
        generator = torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))
        dtype = DTYPES[self.dtype]
        q, k, v = (
            torch.randn(
                [(self.batch, heads, self.length, self.head_dim)[axis] for axis in self.perm], generator=generator
            )
            for heads in (self.heads, self.heads // self.group, self.heads // self.group)
        )
        if self.softcap:
            q *= LARGE  # scores that the cap changes
        if self.shared_qk:
            k = torch.nn.functional.normalize(k, dim=-1)
        mask = bias = None
        if self.mask:
            mask = torch.rand(self.batch, self.length, generator=generator) > 0.3
            mask[0, : self.length // 2] = False
        if self.bias:
            g = self.geometry
            bias = torch.randn(self.heads, g.window_size, g.keys_per_window, generator=generator)
            bias[torch.rand(bias.shape, generator=generator) < 0.1] = -torch.inf
            bias[0, 0] = -torch.inf
            bias = bias.to(dtype)
        sinks = [(3 * torch.randn(self.heads, generator=generator)).to(dtype)] * self.sinks
        return (q * size).to(dtype), k.to(dtype), v.to(dtype), mask, bias, *sinks


def expected(case: Case, tensors: tuple[torch.Tensor | None, ...]) -> np.ndarray:
    q, k, v, mask, bias, *sinks = (None if x is None else x.double().numpy() for x in tensors)
    attributes = case.attributes
    if isinstance(attributes, GroupedAttributes):
        hidden = None if mask is None else mask.astype(bool)
        a = attributes
        return reference.grouped_attention(a.geometry, a.scale, a.softcap, a.perm, q, k, v, hidden, *sinks)
    return reference.windowed_attention(
        attributes,
        q,
        k,
        v,
        None if mask is None else mask.astype(bool),
        None if bias is None else np.maximum(bias, LOWEST_BIAS),
    )


def judge(actual: torch.Tensor, case: Case, tensors: tuple[torch.Tensor | None, ...]) -> None:
    """The kernel's output is right, finite everywhere, and zero in rows without keys."""
    assert torch.isfinite(actual).all()
    # One product of TF32 has the digits of fp16, which tensor cores may cut off; three have those of fp32.
    finest = {"ieee": TOLERANCE[case.dtype], "tf32x3": TOLERANCE["fp32"], "tf32": 2 * TOLERANCE["fp16"]}
    most = finest[case.fp32_products] * (LARGE if case.softcap else 1)
    np.testing.assert_allclose(actual.double().numpy(), expected(case, tensors), rtol=most / 2, atol=most)
    if case.mask:
        geometry = case.geometry
        if geometry.sees_all:  # as a window as long as the sequence
            geometry = replace(geometry, window_size=case.length)
        dead = reference.rows_without_keys(geometry, tensors[3].numpy())
        assert dead.any() or geometry.keys_per_window > case.length // 2
        rows = actual if case.perm == SEQUENCE_FIRST else actual.transpose(1, 2)
        assert not rows[torch.from_numpy(dead)].any()


def geometries(window: int) -> list[WindowGeometry]:
    """Every kind of window of this size, to two windows back and ahead."""
    kinds = itertools.product((False, True), (False, True), range(3), range(3))
    return [WindowGeometry(window, b, f, causal, exact) for causal, exact, b, f in kinds if not (causal and f)]


def some_case(geometry: WindowGeometry, seed: int) -> Case:
    """The rest of a case, drawn by seed: a length around a multiple of the window, inputs, layout."""
    rng = random.Random(f"{geometry}{seed}")
    w = geometry.window_size
    length = max(1, rng.choice([1, 2, 4]) * w + rng.choice([-1, 0, 1, w // 2]))
    flags = {name: rng.random() < 0.4 for name in ("mask", "bias", "shared_qk")}
    return Case(
        geometry,
        length,
        batch=rng.choice([1, 2]),
        perm=rng.choice([SEQUENCE_FIRST, HEADS_FIRST]),
        tile=rng.choice([SMALL_TILE, Tile(32, 16, 4, 2), Tile(16, 32, 4, 2)]),
        **flags,
    )


def named(case: Case) -> str:
    g, flags = case.geometry, "".join(f"-{n}" for n in ("mask", "bias", "shared_qk") if getattr(case, n))
    layout = "bnhd" if case.perm == SEQUENCE_FIRST else "bhnd"
    kind = f"{'causal' if g.causal else 'open'}-{'exact' if g.exact_windowsize else 'block'}"
    window = "all" if g.sees_all else f"w{g.window_size}-b{g.look_backward}-f{g.look_forward}"
    flags += f"-xpos{case.xpos:g}" * bool(case.xpos) + f"-g{case.group}" * (case.group > 1)
    flags += f"-cap{case.softcap:g}" * bool(case.softcap) + "-sinks" * case.sinks
    flags += f"-{case.fp32_products}" * (case.fp32_products != "ieee")
    return f"{kind}-{window}-n{case.length}-d{case.head_dim}-{case.dtype}-{layout}{flags}-B{case.batch}"
