"""The CPU kernel's numbers against the dense float64 reference, for every instruction set this machine can run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST
from localattn.plugins.library.sidecar import Arch, host_arch

from ...support import reference
from ...support.native.attend_program import (
    SOURCE,
    TOLERANCE,
    Arrays,
    Case,
    Runner,
    check,
    expected,
    geometries,
    grid,
    named,
    some_case,
)
from ...support.native.cpu_program import ELEMENTS, INSTRUCTION_SETS, mutated, program, sanitized, with_instructions
from ...support.native.plugin_build import emulator


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernel(request: pytest.FixtureRequest) -> Runner:
    return Runner.here(request.param)


@pytest.fixture
def best() -> Runner:
    """With the instruction set that it takes by itself."""
    return Runner.here()


WINDOWS = (1, 5, 16, 20, 33, 64)
CAUSAL = WindowGeometry(20, 1, 0, causal=True, exact_windowsize=True)
OPEN = WindowGeometry(20, 1, 1)


@pytest.mark.parametrize("window", WINDOWS)
def test_every_geometry(kernel: Runner, tmp_path: Path, window: int) -> None:
    said = check(kernel, tmp_path, grid((window,), 2))
    assert said["isa"] == dict(kernel.environment)["LOCALATTN_CPU_ISA"]


@pytest.mark.slow
@pytest.mark.parametrize("window", [*WINDOWS, 2, 7, 31, 32, 100])
def test_every_geometry_many_times(kernel: Runner, tmp_path: Path, window: int) -> None:
    check(kernel, tmp_path, [some_case(g, seed) for g in geometries(window) for seed in range(2, 22)])


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_head_size(kernel: Runner, tmp_path: Path, element: str) -> None:
    sizes = (1, 2, 3, 5, 8, 15, 16, 17, 20, 33, 64, 65, 80, 100, 128, 256, 300)
    cases = [Case(OPEN, 70, size, element, heads=1, mask=True, bias=element) for size in sizes]
    check(kernel, tmp_path, cases + [replace(case, geometry=CAUSAL, perm=HEADS_FIRST, bias="") for case in cases])


def test_lengths_around_tiles_tasks_and_blocks(kernel: Runner, tmp_path: Path) -> None:
    lengths = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 511, 512, 513, 600, 1030)
    cases = [Case(CAUSAL, length, heads=1, threads=2) for length in lengths]
    check(kernel, tmp_path, cases + [replace(case, geometry=WindowGeometry(256, 1, 1)) for case in cases])


@pytest.mark.parametrize("head_dim", [16, 256])
def test_windows_larger_than_a_block_of_keys(kernel: Runner, tmp_path: Path, head_dim: int) -> None:
    """Running maxima and sums are carried from block to block; masks empty whole blocks."""
    wide = [WindowGeometry(600, 1, 0, True, True), WindowGeometry(700, 0, 1, False, True), WindowGeometry(1200, 1, 1)]
    cases = [Case(g, 1400, head_dim, heads=1, mask=mask) for g in wide for mask in (False, True)]
    check(kernel, tmp_path, [*cases, Case(WindowGeometry(600, 1, 0), 1300, head_dim, heads=1, bias="fp32")])


def test_scores_that_rise_and_fall_over_blocks(kernel: Runner, tmp_path: Path) -> None:
    """Every block has a higher maximum than all before it, and then a lower one."""
    calls = []
    for sign in (1.0, -1.0):
        case = Case(WindowGeometry(1500, 1, 0), 1500, 8, heads=1)
        query, key, value, *_ = case.arrays()
        assert query is not None and key is not None
        query[:] = sign
        key += np.linspace(-20, 20, 1500, dtype=np.float32)[None, :, None, None]
        calls.append((case, (query, key, value, None, None)))
    for (case, arrays), output in zip(calls, kernel(tmp_path, calls)[0], strict=True):
        np.testing.assert_allclose(output, expected(case, arrays), rtol=0, atol=2e-5)  # scores of 80


def test_weights_are_exponentials(kernel: Runner, tmp_path: Path) -> None:
    """One query, two keys, one channel: the output is the second key's weight, in relative precision."""
    score = np.concatenate((np.linspace(0, -1, 500), np.linspace(-1, -80, 500))).astype(np.float32)
    case = Case(WindowGeometry(2), 2, 1, batch=len(score), heads=1, scale=1.0)
    query = np.ones(case.shape, np.float32)
    key, value = np.zeros(case.shape, np.float32), np.zeros(case.shape, np.float32)
    key[:, 1, 0, 0], value[:, 1] = score, 1
    (output,), _ = kernel(tmp_path, [(case, (query, key, value, None, None))])
    weight = np.exp(score.astype(np.float64))
    error = np.abs(output[:, 0, 0, 0] / (weight / (1 + weight)) - 1)
    # That of 2^x and of two roundings; and the score's own, in units of log 2.
    assert (error < 4.5e-7 + 1.3e-7 * np.abs(score)).all()


@pytest.mark.parametrize("shared_qk", [False, True], ids=["apart", "shared_qk"])
def test_any_scale(kernel: Runner, tmp_path: Path, shared_qk: bool) -> None:
    scales = (-0.3, 0.0, 1e-8, 4.0)
    cases = [Case(CAUSAL, 90, heads=1, scale=scale, shared_qk=shared_qk) for scale in scales]
    calls = [(case, case.arrays()) for case in cases]
    for (case, arrays), output in zip(calls, kernel(tmp_path, calls)[0], strict=True):
        np.testing.assert_allclose(output, expected(case, arrays), rtol=0, atol=2e-5)


def test_a_token_alone_with_itself_sees_itself(kernel: Runner, tmp_path: Path) -> None:
    alone = Case(WindowGeometry(1, 0, 0, causal=True), 40, shared_qk=True)
    lowest = Case(CAUSAL, 40, shared_qk=True, bias="fp32")
    *others, bias = lowest.arrays()
    assert bias is not None
    calls = [(alone, alone.arrays()), (lowest, (*others, np.full_like(bias, -np.inf)))]  # it takes no bias
    for (_, (_, _, value, *_)), output in zip(calls, kernel(tmp_path, calls)[0], strict=True):
        assert value is not None and np.array_equal(output, value)


def test_huge_scores_and_hidden_rows_are_no_nan(kernel: Runner, tmp_path: Path) -> None:
    for element, size in (("fp32", 1e30), ("fp16", 6e3)):
        case = Case(CAUSAL, 90, element=element, mask=True, bias=element)
        query, key, value, mask, bias = case.arrays()
        assert query is not None and value is not None and bias is not None
        hidden = np.full_like(bias, -np.inf)
        calls = [
            (case, ((query * size).astype(query.dtype), key, value, mask, bias)),
            (case, (query, key, value, mask, hidden)),
            (case, (query, key, value, np.zeros_like(mask), bias)),
        ]
        huge, lowest, dead = kernel(tmp_path, calls)[0]
        assert np.isfinite(huge).all() and np.isfinite(lowest).all()
        assert np.abs(huge).max() <= np.abs(value).max() * 1.0001  # averages
        np.testing.assert_allclose(lowest, expected(*calls[1]), rtol=0, atol=TOLERANCE[element])
        assert not dead.any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("exact", [False, True], ids=["block", "exact"])
def test_keys_that_no_query_of_a_tile_sees_are_never_read(
    kernel: Runner, tmp_path: Path, exact: bool, poison: float
) -> None:
    """Before the window, after it, of another head and batch entry, and those that the mask hides. Tiles are ≤ 32."""
    case = Case(WindowGeometry(32, 1, 0, True, exact), 512, batch=2, mask=True)
    query, key, value, mask, _ = case.arrays()
    assert query is not None and key is not None and value is not None and mask is not None
    mask[0, 64:300] = np.arange(236) % 3 != 1
    clean = expected(case, (query, np.copy(key), np.copy(value), mask, None))
    hidden = ~mask[0]
    for tensor in (key, value):
        tensor[0, :64] = tensor[0, 300:] = tensor[0, hidden] = poison
        tensor[:, :, 1] = tensor[1] = poison
    (output,), _ = kernel(tmp_path, [(case, (query, key, value, mask, None))])
    np.testing.assert_allclose(output[0, 128:288, 0], clean[0, 128:288, 0], rtol=0, atol=TOLERANCE["fp32"])
    assert not np.isfinite(output[1]).all()


def by_sequence(array: NDArray[Any], case: Case) -> NDArray[Any]:
    """`[B, N, H, D]`, whatever the case's layout; and back."""
    return array.transpose(0, 2, 1, 3) if case.perm == HEADS_FIRST else array


def seen_by(case: Case, arrays: Arrays, position: int) -> NDArray[np.bool_]:
    """Queries of the first batch entry that see a key, its mask included."""
    mask = arrays[3]
    visible: NDArray[np.bool_] = reference.upstream_visibility(case.geometry, case.length)[:, position]
    return visible if mask is None or mask[0, position] else np.zeros_like(visible)


def unusual_cases() -> list[Case]:
    """Every kind of window of 20, each with some of the other inputs; several blocks of keys; less than a tile."""
    some = [
        Case(
            geometry,
            90,
            20,
            ELEMENTS[i % 2],
            mask=i % 3 == 0,
            bias="fp32" if i % 5 == 0 else "",
            shared_qk=i % 7 == 0,
            perm=(SEQUENCE_FIRST, HEADS_FIRST)[i % 4 == 0],
        )
        for i, geometry in enumerate(geometries(20))
    ]
    return [*some, Case(WindowGeometry(400, 1, 0, True, True), 1100, 20, heads=1), Case(WindowGeometry(9), 5, 4)]


@pytest.mark.parametrize("naive", [False, True], ids=["fast", "naive"])
def test_values_that_are_not_finite_reach_the_queries_that_see_them(
    kernel: Runner, tmp_path: Path, naive: bool
) -> None:
    """And no other: every bit of the others is that of a call without them."""
    calls: list[tuple[Case, Arrays]] = []
    for case in unusual_cases():
        case = replace(case, naive=naive)
        query, key, value, mask, bias = case.arrays()
        assert value is not None
        poisoned = value.copy()
        for channel, number in enumerate((np.nan, np.inf, -np.inf)):
            by_sequence(poisoned, case)[0, positions(case)[channel], 0, channel] = number
        calls += [(case, (query, key, value, mask, bias)), (case, (query, key, poisoned, mask, bias))]
    outputs = kernel(tmp_path, calls)[0]
    for (case, arrays), clean, output in zip(calls[1::2], outputs[::2], outputs[1::2], strict=True):
        with np.errstate(invalid="ignore"):
            right = expected(case, arrays)
        concerned = np.zeros(clean.shape, bool)
        for channel, position in enumerate(positions(case)):
            by_sequence(concerned, case)[0, seen_by(case, arrays, position), 0, channel] = True
        assert concerned.any() or arrays[3] is not None
        assert np.array_equal(~np.isfinite(output), concerned), named(case)
        assert np.array_equal(~np.isfinite(right), concerned), named(case)
        assert np.array_equal(output[~concerned], clean[~concerned]), named(case)


def positions(case: Case) -> tuple[int, int, int]:
    """Where `test_values_that_are_not_finite_…` puts them."""
    return 0, case.length // 3, case.length - 1


# Quiet ones, a signalling one, and some whose lowest bits would be an exponent.
NANS = {
    "fp32": (np.uint32, (0x7FC00000, 0x7FC00001, 0xFFC00155, 0x7F800001, 0x7FFFFFFF)),
    "fp16": (np.uint16, (0x7E01,)),
}


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("tensor", ["query", "key", "attn_bias"])
def test_a_nan_among_the_scores_makes_the_row_nan(kernel: Runner, tmp_path: Path, tensor: str, element: str) -> None:
    """Whatever its bits; and no row that does not have the score."""
    kind, nans = NANS[element]
    index = {"query": 0, "key": 1, "attn_bias": 4}[tensor]
    calls: list[tuple[Case, Arrays]] = []
    for geometry in (CAUSAL, OPEN, WindowGeometry(20, 1, 0, causal=True)):
        case = Case(geometry, 90, 20, element, heads=1, bias=element if tensor == "attn_bias" else "")
        arrays = case.arrays()
        for bits in nans:
            poisoned = np.copy(arrays[index])  # type: ignore[arg-type]
            # Of the bias: the fifth query of every window, and the first key of its window.
            poisoned.view(kind)[(0, 5, 20) if tensor == "attn_bias" else (0, 45, 0, 7)] = bits
            calls += [(case, arrays), (case, (*arrays[:index], poisoned, *arrays[index + 1 :]))]
    outputs = kernel(tmp_path, calls)[0]
    for (case, arrays), clean, output in zip(calls[::2], outputs[::2], outputs[1::2], strict=True):
        concerned = {
            "query": np.arange(90) == 45,
            "key": seen_by(case, arrays, 45),
            "attn_bias": np.arange(90) % 20 == 5,
        }
        rows = concerned[tensor]
        assert np.isnan(output[:, rows]).all(), named(case)
        assert np.array_equal(output[:, ~rows], clean[:, ~rows]), named(case)


def test_heads_of_any_width(kernel: Runner, tmp_path: Path) -> None:
    """Wider than a task's memory serves for: then few tokens are computed by the definition."""
    sizes = ((70, 1100), (70, 5000), (40, 6000), (3, 200_000), (1, 200_000))
    halves = [Case(OPEN, length, width, "fp16", heads=1) for length, width in sizes]
    few = [Case(OPEN, 1, 200_000, heads=1)]
    check(kernel, tmp_path, [*halves, *few, Case(WindowGeometry(1200, 1, 0, True, True), 1300, 5, heads=1, naive=True)])


def test_numbers_do_not_depend_on_tasks_or_threads(kernel: Runner, tmp_path: Path) -> None:
    for geometry in (WindowGeometry(64, 1, 0, True, True), WindowGeometry(300, 1, 1), CAUSAL):
        cases = [Case(geometry, 1500, 24, heads=3, mask=True, threads=threads) for threads in (1, 2, 3, 16)]
        arrays = cases[0].arrays()
        outputs, said = kernel(tmp_path, [(case, arrays) for case in cases])
        assert all(np.array_equal(outputs[0], output) for output in outputs[1:])
        assert said["tasks"] == sorted(said["tasks"]) and said["tasks"][0] < said["tasks"][-1]


def test_an_empty_output_has_no_tasks(best: Runner, tmp_path: Path) -> None:
    some = Case(CAUSAL, 40)
    cases = [replace(some, batch=0), replace(some, heads=0), replace(some, length=0)]
    calls = [(case, tuple([np.zeros(case.shape, np.float32)] * 3 + [None, None])) for case in cases]
    assert best(tmp_path, calls)[1]["tasks"] == [0, 0, 0]


def test_the_definition_in_double_agrees(best: Runner, tmp_path: Path) -> None:
    """And takes over, to the same result, where there is no memory."""
    cases = grid((5, 33), 1)
    naive = check(best, tmp_path, [replace(case, naive=True) for case in cases])
    assert not any(naive["tasks"])
    without = check(best, tmp_path, cases, DRIVE_NO_MEMORY="1")
    assert all(without["tasks"]) and without["scratch"] == 0


def test_scratch_memory_is_bounded(best: Runner, tmp_path: Path) -> None:
    """Per thread; whatever length, window and head size."""
    sizes = []
    for window, length, head_dim in ((256, 1024, 64), (256, 16384, 64), (8192, 16384, 64), (256, 1024, 256)):
        case = Case(WindowGeometry(window, 1, 0, True, True), length, head_dim, heads=1, mask=True)
        arrays = list(case.arrays())
        arrays[3] = np.arange(length)[None] > length - 300  # few keys to compute
        sizes.append(best(tmp_path, [(case, tuple(arrays))])[1]["scratch"])
    assert sizes[1] == sizes[2], sizes
    assert max(sizes) < 600_000, sizes


def test_halves_are_converted_bit_for_bit(best: Runner, tmp_path: Path) -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = np.sort(every[np.isfinite(every)]).astype(np.float32)
    between = (finite[:-1] + finite[1:]) / 2  # ties
    rng = np.random.default_rng(0)
    random_floats = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    floats = np.concatenate((every.astype(np.float32), between, np.nextafter(between, np.float32(9e9)), random_floats))
    floats.tofile(tmp_path / "floats")
    best.call("--half", tmp_path / "floats", tmp_path / "out")
    made = (tmp_path / "out").read_bytes()
    wide = np.frombuffer(made, np.float32, 65536)
    with np.errstate(all="ignore"):
        halves = floats.astype(np.float16)
    assert np.array_equal(wide, every.astype(np.float32), equal_nan=True)
    assert np.array_equal(np.signbit(wide), np.signbit(every))
    assert np.array_equal(np.frombuffer(made, np.float16, offset=4 * 65536), halves, equal_nan=True)


@settings(
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_cases(kernel: Runner, tmp_path: Path, data: st.DataObject) -> None:
    causal = data.draw(st.booleans(), "causal")
    geometry = WindowGeometry(
        data.draw(st.integers(1, 90), "window"),
        data.draw(st.integers(0, 3), "back"),
        0 if causal else data.draw(st.integers(0, 3), "forward"),
        causal,
        data.draw(st.booleans(), "exact"),
    )
    element = data.draw(st.sampled_from(ELEMENTS), "element")
    case = Case(
        geometry,
        data.draw(st.integers(1, 300), "length"),
        head_dim=data.draw(st.integers(1, 140), "head_dim"),
        element=element,
        batch=data.draw(st.integers(1, 2), "batch"),
        heads=data.draw(st.integers(1, 3), "heads"),
        mask=data.draw(st.booleans(), "mask"),
        bias=data.draw(st.sampled_from(["", *ELEMENTS]), "bias"),
        shared_qk=data.draw(st.booleans(), "shared_qk"),
        perm=data.draw(st.sampled_from([SEQUENCE_FIRST, HEADS_FIRST]), "layout"),
        threads=data.draw(st.integers(1, 4), "threads"),
    )
    check(kernel, tmp_path, [case])


def test_on_the_other_processor(tmp_path: Path) -> None:
    """Emulated: numbers only."""
    arch: Arch = "aarch64" if host_arch() == "x86_64" else "x86_64"
    emulator(arch)
    runner = Runner(program(SOURCE, arch, "-O3"), arch)
    said = check(runner, tmp_path, [*grid((5, 20), 1), Case(OPEN, 300, 64, "fp16", bias="fp16", threads=2)])
    assert said["isa"] == "neon" or arch == "x86_64"
    check(runner, tmp_path, grid((16,), 1), LOCALATTN_CPU_ISA="baseline")


@pytest.mark.slow
def test_no_access_outside_the_tensors(tmp_path: Path) -> None:
    """Every tensor is a block of its own size."""
    executable = sanitized(SOURCE, "address,undefined")
    for name in INSTRUCTION_SETS:
        runner = Runner(executable, host_arch(), with_instructions(name))
        check(runner, tmp_path, [replace(case, threads=2) for case in grid((5, 20), 1)])


@pytest.mark.slow
def test_no_race(tmp_path: Path) -> None:
    runner = Runner(sanitized(SOURCE, "thread"), host_arch())
    check(runner, tmp_path, [replace(case, threads=4) for case in grid((20, 33), 1)])


FAULTS = {
    "first": ("query : start) - backward_reach(window)", "query : start) - backward_reach(window) + 1"),
    "end": ("end = query + 1;", "end = query + 2;"),
    "forward": ("query + 1 : start", "query : start"),
    "bias": ("keys_per_window(window) - gathered", "keys_per_window(window) + 1 - gathered"),
}


@pytest.mark.parametrize("fault", ["first", *(pytest.param(name, marks=pytest.mark.slow) for name in [*FAULTS][1:])])
def test_a_fault_of_one_position_is_seen(tmp_path: Path, fault: str) -> None:
    sources = mutated(tmp_path, "window.h", *FAULTS[fault])
    runner = Runner(program(SOURCE, host_arch(), "-O0", sources=sources), host_arch())
    exact = WindowGeometry(20, 1, 1, exact_windowsize=True)
    concerned = {"first": [CAUSAL, OPEN, exact], "end": [CAUSAL], "forward": [exact], "bias": [CAUSAL, OPEN, exact]}
    for geometry in concerned[fault]:
        with pytest.raises(AssertionError, match="Not equal"):
            check(runner, tmp_path, [Case(geometry, 90, bias="fp32" if fault == "bias" else "")])
