"""The CPU kernel with shared heads, all keys, a cap, sinks and xpos, against dense float64 references."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST
from localattn.plugins.library.sidecar import Arch, host_arch

from ...support.native.attend_program import SOURCE, TOLERANCE, Case, Runner, check, expected, geometries
from ...support.native.cpu_program import ELEMENTS, INSTRUCTION_SETS, program, sanitized, with_instructions
from ...support.native.plugin_build import emulator

WINDOWS = (
    WindowGeometry.reaching(19, 0),
    WindowGeometry.reaching(12, 20),
    WindowGeometry.reaching(0, 9),
    WindowGeometry(20, 0, 0, causal=True),  # chunks
    WindowGeometry(20, 1, 1),
    WindowGeometry.all_keys(causal=True),
    WindowGeometry.all_keys(causal=False),
)


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernel(request: pytest.FixtureRequest) -> Runner:
    return Runner.here(request.param)


def grouped(geometry: WindowGeometry, seed: int) -> Case:
    """A case with shared heads, and perhaps a cap, sinks and a mask; its length is near a multiple of the window."""
    rng = random.Random(f"{geometry}{seed}")
    groups = rng.choice([1, 2, 3, 4])
    element = rng.choice(ELEMENTS)
    return Case(
        geometry,
        rng.choice([1, 19, 20, 21, 39, 61, 140]),
        head_dim=rng.choice([4, 16, 20, 64, 80]),
        element=element,
        batch=rng.choice([1, 2]),
        heads=groups * rng.choice([1, 2]),
        groups=groups,
        mask=rng.random() < 0.5,
        softcap=rng.choice([0.0, 1.5, 30.0]),
        sinks=rng.random() < 0.5,
        perm=rng.choice([SEQUENCE_FIRST, HEADS_FIRST]),
        threads=rng.choice([1, 2, 5]),
    )


def with_xpos(geometry: WindowGeometry, seed: int) -> Case:
    """A case with xpos; its base is half the window, as upstream's, or less."""
    rng = random.Random(f"xpos {geometry}{seed}")
    element = rng.choice(ELEMENTS)
    window = geometry.window_size
    return Case(
        geometry,
        max(1, rng.choice([1, 2, 5]) * window + rng.choice([-1, 0, 1])),
        head_dim=rng.choice([2, 16, 20, 64, 80]),
        element=element,
        heads=rng.choice([1, 3]),
        mask=rng.random() < 0.4,
        bias=rng.choice(["", element]),
        shared_qk=rng.random() < 0.3,
        xpos=rng.choice([max(1.0, window / 2), max(1.0, window / 4)]),
        perm=rng.choice([SEQUENCE_FIRST, HEADS_FIRST]),
        threads=rng.choice([1, 3]),
    )


@pytest.mark.parametrize("geometry", WINDOWS, ids=lambda g: g.describe().replace(" ", "_"))
def test_grouped(kernel: Runner, tmp_path: Path, geometry: WindowGeometry) -> None:
    check(kernel, tmp_path, [grouped(geometry, seed) for seed in range(12)])


@pytest.mark.slow
@pytest.mark.parametrize("geometry", WINDOWS, ids=lambda g: g.describe().replace(" ", "_"))
def test_grouped_many_times(kernel: Runner, tmp_path: Path, geometry: WindowGeometry) -> None:
    check(kernel, tmp_path, [grouped(geometry, seed) for seed in range(12, 90)])


def test_all_keys_over_many_blocks(kernel: Runner, tmp_path: Path) -> None:
    """Running maxima and sums are carried from block to block."""
    for geometry in WINDOWS[-2:]:
        cases = [
            Case(geometry, 1100, 16, heads=2, groups=2, mask=True, threads=2),
            Case(geometry, 1030, 64, heads=3, groups=3, sinks=True, element="fp16", threads=3),
            Case(geometry, 600, 256, heads=1, softcap=20.0),
        ]
        check(kernel, tmp_path, cases)


@pytest.mark.parametrize("window", [2, 5, 16, 33, 300])
def test_xpos(kernel: Runner, tmp_path: Path, window: int) -> None:
    some = geometries(window) if window < 100 else geometries(window)[:2]
    for case in [with_xpos(geometry, seed) for geometry in some for seed in range(2)]:
        calls = [(case, case.arrays())]
        (output,), _ = kernel(tmp_path, calls)
        right = expected(*calls[0])
        # Scores grow by the decay where later keys are seen, and with them what fp32 rounds.
        size = max(1.0, float(np.abs(score_growth(case)).max()))
        np.testing.assert_allclose(output, right, rtol=0, atol=TOLERANCE[case.element] + 4e-6 * size)


def score_growth(case: Case) -> float:
    """The largest factor by which xpos multiplies a product."""
    ahead = case.geometry.window_size * (0 if case.geometry.causal else 1)
    return float((2 / 7) ** -(ahead / case.xpos))


def test_xpos_far_from_the_first_token(kernel: Runner, tmp_path: Path) -> None:
    """A global exponent would overflow: 1000 tokens at base 2 are 2^903."""
    geometry = WindowGeometry(8, 1, 0, causal=True)
    for element in ELEMENTS:
        check(kernel, tmp_path, [Case(geometry, 1000, 8, element, heads=1, xpos=base) for base in (1.0, 2.0, 4.0)])


def test_sinks_as_far_as_floats_go(kernel: Runner, tmp_path: Path) -> None:
    """A sink above all scores takes all weight, one far below takes none; nothing is NaN."""
    case = Case(WINDOWS[0], 90, 16, heads=4, groups=2, sinks=True, mask=True)
    query, key, value, mask, bias, sinks = case.arrays()
    assert sinks is not None
    calls = []
    for size in (-np.inf, -1e38, -1e4, 0.0, 40.0, 1e4, 1e38):
        calls.append((case, (query, key, value, mask, bias, np.full_like(sinks, size))))
    outputs = kernel(tmp_path, calls)[0]
    for (_, arrays), output in zip(calls, outputs, strict=True):
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(output, expected(case, arrays), rtol=0, atol=TOLERANCE["fp32"])
    assert not outputs[-1].any() and np.array_equal(outputs[0], outputs[1])


def test_the_cap_is_the_tangent_within_rounding(kernel: Runner, tmp_path: Path) -> None:
    """Two keys with values 0 and 1, of which the first has score 0: the output tells the second's score."""
    score = np.concatenate((np.linspace(-8, 8, 2001), np.geomspace(1e-6, 1, 500))).astype(np.float32)
    for cap in (1.0, 3.0):
        case = Case(WindowGeometry(2), 2, 1, batch=len(score), heads=1, scale=1.0, softcap=cap)
        query, key, value = (np.zeros(case.shape, np.float32) for _ in range(3))
        query[:], key[:, 1, 0, 0], value[:, 1] = cap, score, 1
        (output,), _ = kernel(tmp_path, [(case, (query, key, value, None, None))])
        weight = output[:, 0, 0, 0].astype(np.float64)
        found = np.log(weight / (1 - weight))
        np.testing.assert_allclose(found, cap * np.tanh(score.astype(np.float64)), rtol=2e-6, atol=1e-6)


def test_nan_stays_nan_under_a_cap_and_a_sink(kernel: Runner, tmp_path: Path) -> None:
    case = Case(WINDOWS[0], 60, 16, heads=2, softcap=5.0, sinks=True)
    query, *others = case.arrays()
    assert query is not None
    poisoned = query.copy()
    poisoned[0, 30, 1, 3] = np.nan
    clean, output = kernel(tmp_path, [(case, (query, *others)), (case, (poisoned, *others))])[0]
    assert np.isnan(output[0, 30, 1]).all()
    concerned = np.isnan(output)
    assert concerned.sum() == 16 and np.array_equal(output[~concerned], clean[~concerned])


def test_the_definition_in_double_agrees(tmp_path: Path) -> None:
    """And takes over, to the same result, where there is no memory."""
    best = Runner.here()
    cases = [grouped(geometry, seed) for geometry in WINDOWS for seed in range(2)]
    cases += [Case(WindowGeometry(8, 1, 1), 40, 16, xpos=4.0, mask=True)]
    check(best, tmp_path, [replace(case, naive=True) for case in cases])
    without = check(best, tmp_path, cases, DRIVE_NO_MEMORY="1")
    assert all(without["tasks"]) and without["scratch"] == 0


def test_numbers_do_not_depend_on_tasks_or_threads(kernel: Runner, tmp_path: Path) -> None:
    window = WindowGeometry(64, 1, 0, True, True)
    some = Case(window, 1500, 24, heads=4, mask=True)
    alike = [
        replace(some, groups=4, sinks=True, softcap=10.0),
        replace(some, geometry=WINDOWS[-2], groups=2),
        replace(some, xpos=32.0),
        replace(some, geometry=WindowGeometry(10, 1, 1), xpos=2.0),
    ]
    for case in alike:
        calls = [(replace(case, threads=threads), case.arrays()) for threads in (1, 2, 16)]
        outputs, _ = kernel(tmp_path, calls)
        assert all(np.array_equal(outputs[0], output) for output in outputs[1:])


def test_scratch_memory_does_not_grow_with_the_length(tmp_path: Path) -> None:
    sizes = []
    for length in (2048, 16384):
        case = Case(WINDOWS[-1], length, 64, heads=1, mask=True)
        arrays = list(case.arrays())
        arrays[3] = np.arange(length)[None] > length - 300  # few keys to compute
        sizes.append(Runner.here()(tmp_path, [(case, tuple(arrays))])[1]["scratch"])
    assert sizes[0] == sizes[1] < 600_000, sizes


def test_on_the_other_processor(tmp_path: Path) -> None:
    """Emulated: numbers only."""
    arch: Arch = "aarch64" if host_arch() == "x86_64" else "x86_64"
    emulator(arch)
    runner = Runner(program(SOURCE, arch, "-O3"), arch)
    check(runner, tmp_path, [grouped(geometry, 1) for geometry in WINDOWS] + [Case(WINDOWS[0], 60, xpos=10.0)])


@pytest.mark.slow
def test_no_access_outside_the_tensors(tmp_path: Path) -> None:
    executable = sanitized(SOURCE, "address,undefined")
    for name in INSTRUCTION_SETS:
        runner = Runner(executable, host_arch(), with_instructions(name))
        check(runner, tmp_path, [grouped(geometry, seed) for geometry in WINDOWS for seed in range(3)])
        some = [Case(WindowGeometry(window, 1, 1), 61, size, xpos=4.0) for window in (5, 16) for size in (2, 20, 66)]
        for case in some:
            runner(tmp_path, [(case, case.arrays())])
