"""The kernel's numbers, in Triton's interpreter, against the dense float64 reference."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localattn.core.errors import UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.node import HEADS_FIRST, LOWEST_BIAS, SEQUENCE_FIRST, NodeAttributes
from localattn.plugins.kernel.spec import KernelSpec, Tile
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.kernel.tiles import tile_for
from localattn.plugins.torch_op import windowed_attention

from . import reference
from .kernel_worker import Worker

pytest.importorskip("triton", reason="Triton interprets the kernel: pip install 'localattn[plugin]'")

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Outputs are averages of values of size 1; weights are rounded to the input's type before the second product.
TOLERANCE = {"fp32": 4e-6, "fp16": 2e-3, "bf16": 2e-2}
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

    @property
    def attributes(self) -> NodeAttributes:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return NodeAttributes(self.geometry, scale, shared_qk=self.shared_qk, perm=self.perm)

    def tensors(self, size: float = 1.0) -> tuple[torch.Tensor | None, ...]:
        """Query, key, value, mask and bias; a mask that hides long stretches, a bias with -inf and a row of it."""
        generator = torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))
        shape = [(self.batch, self.heads, self.length, self.head_dim)[axis] for axis in self.perm]
        dtype = DTYPES[self.dtype]
        q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
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
        return (q * size).to(dtype), k.to(dtype), v.to(dtype), mask, bias


def expected(case: Case, tensors: tuple[torch.Tensor | None, ...]) -> np.ndarray:
    q, k, v, mask, bias = (None if x is None else x.double().numpy() for x in tensors)
    return reference.windowed_attention(
        case.attributes,
        q,
        k,
        v,
        None if mask is None else mask.astype(bool),
        None if bias is None else np.maximum(bias, LOWEST_BIAS),
    )


def check(worker: Worker, case: Case, size: float = 1.0) -> None:
    tensors = case.tensors(size)
    actual = worker("launch", *tensors, case.attributes, case.tile)
    assert actual.dtype == DTYPES[case.dtype] and actual.is_contiguous()
    assert torch.isfinite(actual).all()
    np.testing.assert_allclose(actual.double().numpy(), expected(case, tensors), rtol=0, atol=TOLERANCE[case.dtype])
    if case.mask:
        dead = reference.rows_without_keys(case.geometry, tensors[3].numpy())
        assert dead.any() or case.geometry.keys_per_window > case.length // 2
        rows = actual if case.perm == SEQUENCE_FIRST else actual.transpose(1, 2)
        assert not rows[torch.from_numpy(dead)].any()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.close()


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
    window = f"w{g.window_size}-b{g.look_backward}-f{g.look_forward}"
    return f"{kind}-{window}-n{case.length}-d{case.head_dim}-{case.dtype}-{layout}{flags}-B{case.batch}"


GRID = [some_case(g, index) for index, g in enumerate([*geometries(24), *geometries(5)])]
FULL_GRID = [
    replace(some_case(g, seed), head_dim=head_dim, dtype=dtype)
    for seed, window in enumerate((1, 7, 16, 20, 33, 64))
    for g in geometries(window)
    for head_dim, dtype in ((16, "fp32"), (40, "fp16"), (64, "bf16"), (80, "fp32"))
]


@pytest.mark.parametrize("case", GRID, ids=named)
def test_every_geometry(worker: Worker, case: Case) -> None:
    check(worker, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL_GRID, ids=named)
def test_every_geometry_type_and_head_size(worker: Worker, case: Case) -> None:
    check(worker, case)


CAUSAL = WindowGeometry(20, 1, 0, causal=True, exact_windowsize=True)
OPEN = WindowGeometry(20, 1, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 128, 256])
def test_every_head_size_and_type_with_its_own_tile(worker: Worker, head_dim: int, dtype: str) -> None:
    spec = KernelSpec(dtype, head_dim, has_mask=True, has_bias=True)
    tile = tile_for(spec, TARGETS["sm_80"])
    check(worker, Case(OPEN, 90, head_dim, dtype, heads=1, mask=True, bias=True, tile=tile))


@pytest.mark.parametrize("head_dim", [17, 33, 100])
def test_head_sizes_that_align_with_nothing(worker: Worker, head_dim: int) -> None:
    check(worker, Case(CAUSAL, 50, head_dim, heads=3, batch=2))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65])
def test_lengths_around_the_tiles(worker: Worker, length: int) -> None:
    check(worker, Case(CAUSAL, length, heads=1, tile=Tile(64, 32, 4, 2)))
    check(worker, Case(OPEN, length, heads=1, perm=HEADS_FIRST, tile=Tile(16, 64, 4, 2)))


@pytest.mark.parametrize("shared_qk", [False, True], ids=["apart", "shared_qk"])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-8, 4.0])
def test_any_scale(worker: Worker, scale: float, shared_qk: bool) -> None:
    for bias in (False, True):
        check(worker, Case(CAUSAL, 40, heads=1, scale=scale, shared_qk=shared_qk, bias=bias))


def test_a_token_alone_with_itself_sees_itself(worker: Worker) -> None:
    """shared_qk lowers a token's own score, but where nothing else is visible it is all there is."""
    alone = WindowGeometry(1, 0, 0, causal=True)
    case = Case(alone, 20, shared_qk=True)
    tensors = case.tensors()
    assert torch.equal(worker("launch", *tensors, case.attributes, case.tile), tensors[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scores_are_no_nan(worker: Worker, dtype: str) -> None:
    size = {"fp32": 1e30, "bf16": 1e30, "fp16": 6e3}[dtype]
    case = Case(CAUSAL, 50, dtype=dtype, mask=True, bias=True)
    q, k, v, mask, bias = case.tensors(size)
    output = worker("launch", q, k, v, mask, bias, case.attributes, case.tile)
    assert torch.isfinite(output).all()
    assert output.abs().max() <= v.abs().max()  # averages


def test_a_row_of_lowest_biases_is_an_average(worker: Worker) -> None:
    case = Case(OPEN, 60, bias=True)
    q, k, v, _, bias = case.tensors()
    hidden = torch.full_like(bias, -torch.inf)
    output = worker("launch", q, k, v, None, hidden, case.attributes, case.tile)
    visible = reference.upstream_visibility(OPEN, 60)
    average = np.einsum("ij,bjhd->bihd", visible / visible.sum(1, keepdims=True), v.double().numpy())
    np.testing.assert_allclose(output.numpy(), average, rtol=0, atol=TOLERANCE["fp32"])


def test_inputs_that_are_not_contiguous_and_an_empty_batch(worker: Worker) -> None:
    case = Case(CAUSAL, 40)
    q, k, v, *_ = case.tensors()
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    expected_output = worker("launch", q, k, v, None, None, case.attributes, case.tile)
    assert torch.equal(worker("launch", *apart, None, None, case.attributes, case.tile), expected_output)
    empty = (x[:0] for x in (q, k, v))
    assert worker("launch", *empty, None, None, case.attributes, case.tile).shape == (0, 40, 2, 16)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_cases(worker: Worker, data: st.DataObject) -> None:
    causal = data.draw(st.booleans(), "causal")
    geometry = WindowGeometry(
        data.draw(st.integers(1, 40), "window"),
        data.draw(st.integers(0, 3), "back"),
        0 if causal else data.draw(st.integers(0, 3), "forward"),
        causal,
        data.draw(st.booleans(), "exact"),
    )
    check(
        worker,
        Case(
            geometry,
            data.draw(st.integers(1, 80), "length"),
            head_dim=data.draw(st.sampled_from([16, 24, 32]), "head_dim"),
            dtype=data.draw(st.sampled_from(sorted(DTYPES)), "dtype"),
            heads=data.draw(st.integers(1, 2), "heads"),
            mask=data.draw(st.booleans(), "mask"),
            bias=data.draw(st.booleans(), "bias"),
            shared_qk=data.draw(st.booleans(), "shared_qk"),
            perm=data.draw(st.sampled_from([SEQUENCE_FIRST, HEADS_FIRST]), "layout"),
            tile=data.draw(st.sampled_from([SMALL_TILE, Tile(32, 16, 4, 2), Tile(16, 32, 4, 2)]), "tile"),
        ),
    )


def operator_arguments(case: Case, xpos_scale_base: float = 0.0) -> list[object]:
    g = case.geometry
    window = [g.window_size, g.look_backward, g.look_forward, g.causal, g.exact_windowsize]
    rest = [case.attributes.scale, case.shared_qk, case.perm == SEQUENCE_FIRST, xpos_scale_base]
    return [*case.tensors(), *window, *rest]


@pytest.mark.parametrize(
    ("case", "base"),
    [
        (Case(OPEN, 30, mask=True, bias=True, shared_qk=True), 0.0),
        (Case(CAUSAL, 50, dtype="fp16", perm=HEADS_FIRST), 0.0),
        (Case(CAUSAL, 50), 8.0),
        (Case(CAUSAL, 50, head_dim=8), 0.0),
    ],
    ids=["kernel", "kernel_fp16", "xpos_by_reference", "small_head_by_reference"],
)
def test_what_the_operator_runs_on_a_gpu(worker: Worker, case: Case, base: float) -> None:
    arguments = operator_arguments(case, base)
    by_reference = windowed_attention(*arguments)
    output = worker("operator", *arguments)
    torch.testing.assert_close(output, by_reference, rtol=0, atol=TOLERANCE[case.dtype])


def test_the_operator_is_registered_for_gpus() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("localattn::windowed_attention", "CUDA")


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (Case(OPEN, 40), {"xpos_scale_base": 8.0}, "Xpos"),
        (Case(OPEN, 1, heads=70000), {}, "70000"),
        (Case(OPEN, 40), {"geometry": WindowGeometry(2**20, 2048)}, "overflow"),
        (Case(OPEN, 40, head_dim=8), {}, "heads 8 wide"),
        (Case(OPEN, 40), {"perm": (0, 3, 1, 2)}, "layout"),
    ],
    ids=["xpos", "many_heads", "huge_window", "small_head", "layout"],
)
def test_what_the_kernel_refuses(worker: Worker, case: Case, change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        worker("launch", *case.tensors()[:3], None, None, replace(case.attributes, **change), case.tile)
