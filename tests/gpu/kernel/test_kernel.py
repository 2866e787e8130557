"""The kernel's numbers, in Triton's interpreter, against the dense float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localattn.core.errors import UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST
from localattn.plugins.grouped_op import grouped_attention
from localattn.plugins.kernel.spec import KernelSpec, Tile
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.kernel.tiles import tile_for
from localattn.plugins.torch_op import windowed_attention

from ...support import reference
from ...support.native.kernel_cases import (
    DTYPES,
    LARGE,
    SMALL_TILE,
    TOLERANCE,
    Case,
    geometries,
    judge,
    named,
    some_case,
)
from ...support.native.kernel_worker import Worker

pytest.importorskip("triton", reason="Triton interprets the kernel: pip install 'localattn[plugin]'")


def check(worker: Worker, case: Case, size: float = 1.0) -> None:
    tensors = case.tensors(size)
    actual = worker("launch", *tensors[:5], case.attributes, case.tile, *tensors[5:])
    assert actual.dtype == DTYPES[case.dtype] and actual.is_contiguous()
    judge(actual, case, tensors)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.close()


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


ALL, ALL_CAUSAL = WindowGeometry.all_keys(causal=False), WindowGeometry.all_keys(causal=True)
SHARED_HEADS = [
    Case(CAUSAL, 50, heads=4, group=2, batch=2),
    Case(OPEN, 70, heads=6, group=3, mask=True, perm=HEADS_FIRST, dtype="fp16"),
    Case(CAUSAL, 90, heads=4, group=4, softcap=2.0, scale=-0.3),
    Case(OPEN, 50, heads=2, softcap=5.0, mask=True, dtype="bf16"),
    Case(CAUSAL, 90, heads=4, group=2, sinks=True, mask=True, batch=2),
    Case(OPEN, 50, heads=3, group=3, sinks=True, dtype="fp16"),
    Case(ALL_CAUSAL, 75, heads=4, group=2, mask=True),
    Case(ALL, 75, heads=2, softcap=3.0, perm=HEADS_FIRST),
    Case(ALL, 40, heads=2, sinks=True, mask=True, batch=2),
]
XPOS = [
    Case(CAUSAL, 90, xpos=10.0, batch=2),
    Case(OPEN, 90, xpos=10.0, mask=True, perm=HEADS_FIRST),
    Case(OPEN, 90, 64, "fp16", heads=1, xpos=10.0, bias=True, tile=Tile(64, 32, 4, 2)),
    Case(CAUSAL, 70, 24, "bf16", heads=1, xpos=512.0, mask=True, bias=True, shared_qk=True),
    Case(WindowGeometry(2, 1, 0, causal=True), 150, 16, "fp16", xpos=1.0, tile=Tile(64, 64, 4, 2)),
    Case(WindowGeometry(4, 1, 1, exact_windowsize=True), 150, 16, xpos=2.0, tile=Tile(128, 32, 8, 2)),
]


@pytest.mark.parametrize("case", [*SHARED_HEADS, *XPOS], ids=named)
def test_shared_heads_softcap_sinks_all_keys_and_xpos(worker: Worker, case: Case) -> None:
    check(worker, case)


def test_a_sink_that_outweighs_every_key(worker: Worker) -> None:
    case = Case(CAUSAL, 50, sinks=True)
    *tensors, sinks = case.tensors()
    for sink, weight in ((3e4, 0.0), (-torch.inf, 1.0)):
        output = worker("launch", *tensors, case.attributes, case.tile, torch.full_like(sinks, sink))
        ordinary = worker("launch", *tensors, case.attributes, case.tile)
        torch.testing.assert_close(output, weight * ordinary, rtol=0, atol=1e-30)


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


@pytest.mark.parametrize("geometry", [CAUSAL, OPEN], ids=["causal", "open"])
def test_where_a_nan_goes(worker: Worker, geometry: WindowGeometry) -> None:
    """Of a key to the queries that see it, whatever its bits; of a value, besides, to others of their tiles."""
    case = Case(geometry, 150, heads=1)
    tensors = case.tensors()
    clean = worker("launch", *tensors, case.attributes, case.tile)
    sees = reference.upstream_visibility(geometry, 150)[:, 70]
    tile = np.arange(150) // case.tile.block_queries
    for index in (1, 2):
        poisoned = [x if x is None else x.clone() for x in tensors]
        poisoned[index].view(torch.int32)[0, 70, 0, 3] = 0x7FC00001
        output = worker("launch", *poisoned, case.attributes, case.tile)[0, :, 0]
        concerned = torch.from_numpy(sees if index == 1 else np.isin(tile, tile[sees]))
        assert output[torch.from_numpy(sees)][:, 3].isnan().all()
        assert torch.equal(output[~concerned], clean[0, ~concerned, 0])


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
        (Case(CAUSAL, 50), 0.5),
        (Case(CAUSAL, 50, head_dim=8), 0.0),
    ],
    ids=["kernel", "kernel_fp16", "kernel_xpos", "small_base_by_reference", "small_head_by_reference"],
)
def test_what_the_operator_runs_on_a_gpu(worker: Worker, case: Case, base: float) -> None:
    arguments = operator_arguments(case, base)
    by_reference = windowed_attention(*arguments)
    output = worker("operator", *arguments)
    torch.testing.assert_close(output, by_reference, rtol=0, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize(
    "case",
    [
        Case(CAUSAL, 50, heads=4, group=2, mask=True, softcap=5.0, perm=HEADS_FIRST),
        Case(WindowGeometry.all_keys(causal=True), 40, heads=4, group=4, sinks=True),
        Case(CAUSAL, 50, heads=2, group=2, softcap=5.0, sinks=True),
        Case(CAUSAL, 50, heads=2, group=2, head_dim=8),
    ],
    ids=["kernel_softcap", "kernel_all_keys_and_sinks", "both_by_reference", "small_head_by_reference"],
)
def test_what_the_grouped_operator_runs_on_a_gpu(worker: Worker, case: Case) -> None:
    g, a = case.geometry, case.attributes
    q, k, v, mask, _, *sinks = case.tensors()
    window = (g.window_size, g.look_backward, g.look_forward, g.causal, g.exact_windowsize)
    rest = (a.scale, case.softcap, case.perm == SEQUENCE_FIRST)
    arguments = (q, k, v, mask, *(sinks or [None]), *window, *rest)
    by_reference = grouped_attention(*arguments)
    output = worker("grouped operator", *arguments)
    np.testing.assert_allclose(
        output, by_reference, rtol=0, atol=TOLERANCE[case.dtype] * (LARGE if case.softcap else 1)
    )
    assert bool((output == by_reference).all()) == (case.head_dim < 16 or bool(case.softcap and case.sinks))


@pytest.mark.parametrize("name", ["windowed_attention", "grouped_attention"])
def test_the_operators_are_registered_for_gpus(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"localattn::{name}", "CUDA")


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (Case(OPEN, 40), {"xpos_scale_base": 0.5}, "xpos base is 0.5; the minimum is 1"),
        (Case(OPEN, 1, heads=70000), {}, "70000"),
        (Case(OPEN, 40), {"geometry": WindowGeometry(2**20, 2048)}, "overflow"),
        (Case(OPEN, 40, head_dim=8), {}, "head size 8"),
        (Case(OPEN, 40), {"perm": (0, 3, 1, 2)}, "layout"),
    ],
    ids=["small_xpos_base", "many_heads", "huge_window", "small_head", "layout"],
)
def test_what_the_kernel_refuses(worker: Worker, case: Case, change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        worker("launch", *case.tensors()[:3], None, None, replace(case.attributes, **change), case.tile)
