"""Calls of the CPU kernel: cases, the C++ program that runs them, and the check against the dense float64 reference.

The program is `tests/support/native/sources/kernels/attend.cpp`.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, LOWEST_BIAS, SEQUENCE_FIRST, NodeAttributes

from .. import reference
from .cpu_program import ELEMENTS, NUMPY, Program

SOURCE = "attend.cpp"
# Outputs are averages of values of size 1; fp16 rounds them once.
TOLERANCE = {"fp32": 4e-6, "fp16": 2e-3}
# How much larger the scores of a case with a cap are, and with them what rounding makes of them.
LARGE = 4

Arrays = tuple["NDArray[Any] | None", ...]


@dataclass(frozen=True)
class Case:
    """One call."""

    geometry: WindowGeometry
    length: int
    head_dim: int = 16
    element: str = "fp32"
    batch: int = 1
    heads: int = 2
    groups: int = 1  # heads of queries for each of keys
    mask: bool = False
    bias: str = ""
    shared_qk: bool = False
    softcap: float = 0.0
    sinks: bool = False
    xpos: float = 0.0
    perm: tuple[int, ...] = SEQUENCE_FIRST
    scale: float | None = None
    threads: int = 1
    naive: bool = False

    @property
    def attributes(self) -> NodeAttributes:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return NodeAttributes(self.geometry, scale, shared_qk=self.shared_qk, perm=self.perm, xpos_scale_base=self.xpos)

    @property
    def shape(self) -> list[int]:
        return self.shape_with(self.heads)

    def shape_with(self, heads: int) -> list[int]:
        return [(self.batch, heads, self.length, self.head_dim)[axis] for axis in self.perm]

    def arrays(self) -> Arrays:
        """Query, key, value, a mask that hides half of the first sequence, a bias with -inf and a row of it, sinks."""
        rng = np.random.default_rng(zlib.crc32(repr(replace(self, threads=1, naive=False)).encode()))
        heads = (self.heads, self.heads // self.groups, self.heads // self.groups)
        data = [rng.standard_normal(self.shape_with(count)).astype(NUMPY[self.element]) for count in heads]
        if self.softcap:
            data[0] *= LARGE  # scores that the cap changes
        mask = bias = None
        if self.mask:
            mask = rng.random((self.batch, self.length)) > 0.3
            mask[0, : self.length // 2] = False
        if self.bias:
            g = self.geometry
            bias = rng.standard_normal((self.heads, g.window_size, g.keys_per_window))
            bias[rng.random(bias.shape) < 0.1] = -np.inf
            bias[0, 0] = -np.inf
            bias = bias.astype(NUMPY[self.bias])
        sinks = rng.standard_normal(self.heads).astype(np.float32) * 3 if self.sinks else None
        return (*data, mask, bias) if sinks is None else (*data, mask, bias, sinks)

    def header(self) -> bytes:
        """As attend.cpp reads it."""
        g = self.geometry
        sizes = [self.batch, self.heads, self.heads // self.groups, self.length, self.head_dim]
        window = [g.window_size, g.look_backward, g.look_forward, g.causal, g.exact_windowsize]
        bias = [bool(self.bias), ELEMENTS.index(self.bias or "fp32")]
        rest = [self.shared_qk, self.mask, *bias, self.sinks, self.threads, self.naive]
        integers = [ELEMENTS.index(self.element), self.perm == SEQUENCE_FIRST, *sizes, *window, *rest]
        return struct.pack(f"{len(integers)}q3d", *integers, self.attributes.scale, self.softcap, self.xpos)


def named(case: Case) -> str:
    g = case.geometry
    kind = f"{'causal' if g.causal else 'open'}-{'exact' if g.exact_windowsize else 'block'}"
    flags = "".join(f"-{name}" for name in ("mask", "bias", "shared_qk") if getattr(case, name))
    window = f"w{g.window_size}-b{g.look_backward}-f{g.look_forward}"
    flags += f"-g{case.groups}-cap{case.softcap:g}-xpos{case.xpos:g}" + "-sinks" * case.sinks
    return f"{kind}-{window}-n{case.length}-d{case.head_dim}-{case.element}{flags}"


class Runner(Program):
    """The program."""

    source = SOURCE

    def __call__(
        self, tmp_path: Path, calls: Sequence[tuple[Case, Arrays]], **environment: str
    ) -> tuple[list[NDArray[Any]], dict[str, Any]]:
        """The outputs of some calls, and what the program said."""
        with (tmp_path / "cases").open("wb") as file:
            for case, arrays in calls:
                file.write(case.header())
                file.writelines(np.ascontiguousarray(array).tobytes() for array in arrays if array is not None)
        said = json.loads(self.call(tmp_path / "cases", tmp_path / "outputs", **environment))
        made, outputs, at = (tmp_path / "outputs").read_bytes(), [], 0
        for case, (query, *_) in calls:
            assert query is not None
            outputs.append(np.frombuffer(made, query.dtype, query.size, at).reshape(case.shape))
            at += query.nbytes
        assert at == len(made)
        return outputs, said


def expected(case: Case, arrays: Arrays) -> NDArray[np.float64]:
    query, key, value, mask, bias, *sinks = arrays
    assert query is not None and key is not None and value is not None
    if sinks or case.groups > 1 or case.softcap or case.geometry.sees_all:
        assert bias is None and not case.shared_qk and not case.xpos
        scale = case.attributes.scale
        return reference.grouped_attention(
            case.geometry, scale, case.softcap, case.perm, query, key, value, mask, *sinks
        )
    if bias is not None:
        bias = np.maximum(bias.astype(np.float64), LOWEST_BIAS)
    return reference.windowed_attention(case.attributes, query, key, value, mask, bias)


@cache
def call_of(case: Case) -> tuple[Arrays, NDArray[np.float64]]:
    """A case's own arrays, not to be written to, and what is expected of them; the same for all instruction sets."""
    arrays = case.arrays()
    return arrays, expected(case, arrays)


def check(runner: Runner, tmp_path: Path, cases: list[Case], **environment: str) -> dict[str, Any]:
    outputs, said = runner(tmp_path, [(case, call_of(case)[0]) for case in cases], **environment)
    for case, output in zip(cases, outputs, strict=True):
        arrays, right = call_of(case)
        assert np.isfinite(output).all(), named(case)
        atol = TOLERANCE[case.element] * (LARGE if case.softcap else 1)
        np.testing.assert_allclose(output, right, rtol=0, atol=atol, err_msg=named(case))
        if arrays[3] is not None:
            geometry = case.geometry
            if geometry.sees_all:  # as a window as long as the sequence
                geometry = replace(geometry, window_size=case.length)
            dead = reference.rows_without_keys(geometry, arrays[3])
            rows = output if case.perm == SEQUENCE_FIRST else output.transpose(0, 2, 1, 3)
            assert not rows[dead].any(), named(case)
    return said


def geometries(window: int) -> list[WindowGeometry]:
    """Every kind of window of this size, to two windows back and ahead."""
    kinds = itertools.product((False, True), (False, True), range(3), range(3))
    return [WindowGeometry(window, b, f, causal, exact) for causal, exact, b, f in kinds if not (causal and f)]


def some_case(geometry: WindowGeometry, seed: int) -> Case:
    """The rest of a case, drawn by seed; its length is near a multiple of the window."""
    rng = random.Random(f"{geometry}{seed}")
    window = geometry.window_size
    element = rng.choice(ELEMENTS)
    return Case(
        geometry,
        max(1, rng.choice([1, 2, 3, 5]) * window + rng.choice([-1, 0, 1, window // 2])),
        head_dim=rng.choice([1, 16, 20, 64, 80, 128]),
        element=element,
        batch=rng.choice([1, 2]),
        heads=rng.choice([1, 3]),
        mask=rng.random() < 0.4,
        bias=rng.choice(["", "", element, "fp32"]),
        shared_qk=rng.random() < 0.4,
        perm=rng.choice([SEQUENCE_FIRST, HEADS_FIRST]),
        threads=rng.choice([1, 2, 5]),
    )


def grid(windows: tuple[int, ...], seeds: int) -> list[Case]:
    return [some_case(g, seed) for window in windows for g in geometries(window) for seed in range(seeds)]
