"""The kernels of fp8: their numbers, interpreted and as every target's PTX, against float64 with the same roundings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from localattn.core.errors import UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST
from localattn.plugins.kernel.budget import beyond_limits
from localattn.plugins.kernel.compile import runs_on
from localattn.plugins.kernel.ring import RingSpec, ring_set
from localattn.plugins.kernel.spec import KernelSpec, Tile, full_set
from localattn.plugins.kernel.targets import TARGETS

from ...support.native import fp8_attention as fp8
from ...support.native.kernel_cases import Case, expected, geometries, named
from ...support.native.kernel_worker import Worker
from .test_ptx_kernel import compiled, launched

pytest.importorskip("triton", reason="Triton compiles the kernel: pip install 'localattn[plugin]'")

# What fp16 does to an output of size 1, and how much a weight on the edge between two numbers of E4M3 may change one.
ROUNDED, ON_AN_EDGE = 1.5e-3, 3e-2


def drawn(case: Case, scales: tuple[float, float, float] = (2**-5, 2**-5, 2**-4)) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a case as numbers of E4M3: query, key and value with their scales taken out."""
    tensors = replace(case, dtype="fp32").tensors()
    eight = (
        torch.from_numpy(fp8.quantised(x.double().numpy(), scale)).to(torch.float8_e4m3fn)
        for x, scale in zip(tensors[:3], scales, strict=True)
        if x is not None
    )
    return (*eight, *tensors[3:5])


def judge(actual: torch.Tensor, case: Case, tensors: tuple[torch.Tensor | None, ...], *, half: bool = False) -> None:
    """The output has the roundings of fp8 and no others; and it is near to what none would give."""
    assert actual.dtype == torch.float16 and torch.isfinite(actual).all()
    q, k, v, mask = (None if x is None else x.double().numpy() for x in tensors[:4])
    visible = None if mask is None else mask.astype(bool)
    assert q is not None and k is not None and v is not None
    right, size = fp8.attention(case, q, k, v, visible, case.tile, half=half), np.abs(v).max()
    wrong = np.abs(actual.double().numpy() - right) / size
    assert np.quantile(wrong, 0.995) < ROUNDED and wrong.max() < ON_AN_EDGE, (np.quantile(wrong, 0.995), wrong.max())
    exact = expected(replace(case, dtype="fp32"), (*tensors[:5],))
    assert np.sqrt(np.mean((right - exact) ** 2)) / np.sqrt(np.mean(exact**2)) < 0.05
    assert not actual.double().numpy()[exact == 0].any()


def scaled(case: Case) -> Case:
    """With the scales of `drawn` in the factor of the scores."""
    return replace(case, scale=case.head_dim**-0.5 * 2**-10, dtype="fp8")


TILE = Tile(32, 32, 4, 2)
CAUSAL = WindowGeometry(24, 1, 0, causal=True, exact_windowsize=True)
INTERPRETED = [
    *(
        scaled(
            Case(g, 70 + 7 * i, 64, heads=1, mask=i % 2 == 1, perm=(HEADS_FIRST, (0, 2, 1, 3))[i // 2 % 2], tile=TILE)
        )
        for i, g in enumerate(geometries(24))
    ),
    scaled(Case(CAUSAL, 1, 128, tile=TILE)),
    scaled(Case(CAUSAL, 97, 128, heads=4, group=2, mask=True, batch=2, tile=Tile(64, 32, 4, 2))),
    scaled(Case(CAUSAL, 64, 16, tile=TILE)),
    scaled(Case(CAUSAL, 33, 40, mask=True, tile=TILE)),
    scaled(Case(WindowGeometry.all_keys(causal=True), 90, 64, heads=2, group=2, tile=TILE)),
]


def test_numbers_of_e4m3() -> None:
    """All 256 of them, what lies between two, and what lies beyond."""
    every = np.arange(256, dtype=np.uint8).view(fp8.E4M3).astype(np.float64)
    every = np.sort(every[np.isfinite(every)])
    np.testing.assert_array_equal(fp8.to_e4m3(every), every)
    middle = (every[1:] + every[:-1]) / 2
    near = np.concatenate([middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)])
    np.testing.assert_array_equal(fp8.to_e4m3(middle), middle.astype(fp8.E4M3).astype(np.float64))
    assert (np.abs(fp8.to_e4m3(near)[:, None] - near[:, None]) <= np.abs(every - near[:, None]).min(1)[:, None]).all()
    np.testing.assert_array_equal(fp8.to_e4m3(np.array([449.0, 1e9, -1e9])), [448, 448, -448])
    # Cut off first, what is a little above the middle becomes the even one.
    assert fp8.to_e4m3(np.array([17.001])) == 18 and fp8.to_half_and_e4m3(np.array([17.001, 17.1])).tolist() == [16, 18]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.close()


@pytest.mark.parametrize("case", INTERPRETED, ids=named)
def test_interpreted(worker: Worker, case: Case) -> None:
    tensors = drawn(case)
    given = [x.view(torch.uint8) for x in tensors[:3] if x is not None]  # what torch can pickle
    judge(worker("launch fp8", *given, *tensors[3:5], case.attributes, case.tile), case, tensors)


def test_the_roundings_can_be_seen() -> None:
    """Without those of the weights, or by way of fp16 where a GPU does not, the numbers are others."""
    case = INTERPRETED[-1]
    tensors = drawn(case)
    q, k, v = (x.double().numpy() for x in tensors[:3] if x is not None)
    right, half = (fp8.attention(case, q, k, v, None, case.tile, half=half) for half in (False, True))
    exact, size = expected(replace(case, dtype="fp32"), tensors[:5]), np.abs(v).max()
    assert np.quantile(np.abs(exact - right) / size, 0.995) > ROUNDED
    assert np.quantile(np.abs(half - right) / size, 0.995) > ROUNDED / 10


@pytest.mark.parametrize(("sharper", "least", "most"), [(1, 0.040, 0.047), (4, 0.075, 0.090)])
def test_what_fp8_costs(sharper: int, least: float, most: float) -> None:
    """The figures of docs/numerics.md: on normal numbers, and the same with scales far from those that are measured."""
    rng, window = np.random.default_rng(0), WindowGeometry(256, 1, 0, causal=True, exact_windowsize=True)
    query, key, value = (rng.standard_normal((1, 512, 1, 64)) * size for size in (sharper, 1, 1))
    case = Case(window, 512, 64, "fp32", heads=1)
    exact = expected(case, (*(torch.from_numpy(x) for x in (query, key, value)), None, None))
    found = []
    for factor in (1, 256):
        scales = [factor * 2.0 ** np.ceil(np.log2(np.abs(x).max() * 4 / fp8.LARGEST)) for x in (query, key, value)]
        numbers = [fp8.quantised(x, scale) for x, scale in zip((query, key, value), scales, strict=True)]
        scaled = replace(case, scale=64**-0.5 * scales[0] * scales[1])
        actual = fp8.attention(scaled, *numbers, None, Tile(64, 64, 4, 3), half=False) * scales[2]
        found.append(np.sqrt(np.mean((actual - exact) ** 2) / np.mean(exact**2)))
    assert least < found[0] < most and found[1] == pytest.approx(found[0], rel=0.03)


# Each set of instructions for fp8.
TARGETS_OF_FP8 = ("sm_89", "sm_90", "sm_100", "sm_120")
COMPILED = [
    scaled(Case(CAUSAL, 150, 64, heads=2, batch=2)),
    scaled(Case(WindowGeometry(40, 0, 1), 131, 64, heads=4, group=2, mask=True, perm=HEADS_FIRST)),
    scaled(Case(WindowGeometry(24, 2, 0, causal=True), 129, 128, heads=1, mask=True)),
    scaled(Case(WindowGeometry(200, 1, 1, exact_windowsize=True), 333, 128, heads=1)),
    scaled(Case(CAUSAL, 77, 40, heads=3, perm=HEADS_FIRST)),
]


@pytest.mark.parametrize(
    ("case", "target"),
    [
        pytest.param(case, target, id=f"{named(case)}-{target}", marks=[pytest.mark.slow] * (index > 0 or place > 0))
        for index, case in enumerate(COMPILED)
        for place, target in enumerate(TARGETS_OF_FP8)
    ],
)
def test_compiled(case: Case, target: str) -> None:
    kernel, program = compiled(case.spec, target)
    assert not beyond_limits(kernel)
    cut, tensors = replace(case, tile=kernel.tile), drawn(case)
    judge(launched(kernel, program, cut, tensors)[0], cut, tensors, half=target == "sm_89")


def test_what_there_is_no_kernel_of() -> None:
    for options in ({"has_bias": True}, {"has_xpos": True}, {"has_softcap": True}, {"has_shared_qk": True}):
        with pytest.raises(UsageError, match="a key mask, but no other input"):
            KernelSpec("fp8", 64, **options)
    with pytest.raises(UsageError, match="head sizes up to 128"):
        KernelSpec("fp8", 136)
    with pytest.raises(UsageError, match="no attention kernel for element type 'fp8'"):
        RingSpec("step", "fp8", 64)
    assert {spec.dtype for spec in full_set()} == {"fp16", "bf16", "fp32"} and not ring_set(["fp8"])
    assert [spec.name for spec in full_set(["fp8"])] == [
        f"localattn_fp8_d{head_dim}{mask}" for head_dim in (64, 128) for mask in ("", "_mask")
    ]
    assert [name for name, target in TARGETS.items() if not runs_on(KernelSpec("fp8", 64), target)] == [
        *("sm_80", "sm_86", "sm_87"),
    ]
