"""The fused CPU kernels' numbers against numpy in float64, for every instruction set this machine can run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localattn.core.nodes.fused import FUSED_BY_OP_TYPE, GATES, ROTATIONS
from localattn.plugins.library.sidecar import Arch, host_arch

from ...support.native.cpu_program import (
    ELEMENTS,
    INSTRUCTION_SETS,
    NUMPY,
    mutated,
    program,
    sanitized,
    with_instructions,
)
from ...support.native.fuse_program import FAULTS, OP_TYPES, SOURCE, Case, Inputs, Runner, check
from ...support.native.fused_reference import expected, gelu, gelu_tanh, silu
from ...support.native.plugin_build import emulator

DIMS = (1, 2, 3, 15, 16, 17, 64, 100, 256, 300)
STREAMS = (1, 2, 3, 4, 5, 8)
LENGTHS = (1, 2, 7, 33)
OF_STREAMS = tuple(op_type for op_type in OP_TYPES if op_type not in (*ROTATIONS, *GATES))


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Runner:
    return Runner.here(request.param)


@pytest.fixture
def best() -> Runner:
    """With the instruction set that it takes by itself."""
    return Runner.here()


def of_streams(op_type: str) -> list[Case]:
    sizes = itertools.product(STREAMS, DIMS, LENGTHS)
    return [Case(op_type, length, dim, streams) for streams, dim, length in sizes]


def rotations(element: str) -> list[Case]:
    """Halves of every length, odd ones too; both layouts, one head and several, one batch entry and several."""
    dims = (2, 6, 16, 30, 34, 64, 100, 256, 300)
    sizes = itertools.product(ROTATIONS, dims, LENGTHS, (1, 3), (False, True), (False, True))
    return [
        Case(op_type, n, d, element=element, batch=b, heads=4 - b, heads_first=f, own_positions=own)
        for op_type, d, n, b, f, own in sizes
    ]


def gates(element: str) -> list[Case]:
    sizes = itertools.product(GATES, LENGTHS, DIMS)
    return [Case(op_type, n, dim, element=element) for op_type, n, dim in sizes]


def small(op_type: str) -> list[Case]:
    """One of every kind of size: less than a vector, no multiple of one, several."""
    elements = ELEMENTS if op_type in (*ROTATIONS, *GATES) else ("fp32",)
    dims = (2, 14, 34, 100) if op_type in ROTATIONS else (1, 3, 17, 100)
    sizes = itertools.product((1, 3, 4, 5), dims, elements, (False, True))  # scratch memory grows
    return [
        Case(op_type, 9, d, s, e, batch=2, heads=3, heads_first=first, own_positions=s % 2 == 0)
        for s, d, e, first in sizes
    ]


@pytest.mark.parametrize("op_type", OF_STREAMS)
def test_streams_of_every_size(kernels: Runner, tmp_path: Path, op_type: str) -> None:
    said = check(kernels, tmp_path, of_streams(op_type))
    assert said["isa"] == dict(kernels.environment)["LOCALATTN_CPU_ISA"]


@pytest.mark.parametrize("element", ELEMENTS)
def test_rotations_of_every_size(kernels: Runner, tmp_path: Path, element: str) -> None:
    check(kernels, tmp_path, rotations(element))


@pytest.mark.parametrize("element", ELEMENTS)
def test_gates_of_every_size(kernels: Runner, tmp_path: Path, element: str) -> None:
    check(kernels, tmp_path, gates(element))


def gated(runner: Runner, tmp_path: Path, gate: Any, element: str = "fp32", op_type: str = "GatedGelu") -> np.ndarray:
    """The activation of a vector of numbers."""
    gate = np.asarray(gate, NUMPY[element]).reshape(1, 1, -1)
    case = Case(op_type, 1, gate.size, element=element)
    (outputs,), _ = runner(tmp_path, [(case, {"value": np.ones_like(gate), "gate": gate})])
    return outputs["gated"].ravel()


def test_gelu_is_within_half_a_millionth(kernels: Runner, tmp_path: Path) -> None:
    """From where it is zero to where it is its argument; half of a unit in the last place of 14 is as much."""
    x = np.concatenate((np.arange(-14, 14, 2e-4), np.geomspace(1e-38, 1, 500), -np.geomspace(1e-38, 1, 500)))
    x = x.astype(np.float32)
    error = np.abs(gated(kernels, tmp_path, x) - gelu(x))
    assert error.max() < 5e-7, (error.max(), x[error.argmax()])
    exact = F.gelu(torch.from_numpy(x).double()).numpy()
    assert np.abs(exact - gelu(x)).max() < 1e-14, "what it is compared with is PyTorch's function"


@pytest.mark.parametrize(
    ("op_type", "formula", "function"),
    [
        ("GatedGeluTanh", gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
        ("GatedSilu", silu, F.silu),
    ],
)
def test_other_activations_are_as_exact(
    kernels: Runner, tmp_path: Path, op_type: str, formula: Callable[..., Any], function: Callable[..., Any]
) -> None:
    """Relative to their value, so that small ones of large negative numbers keep their digits."""
    x = np.concatenate((np.arange(-60, 60, 1e-3), np.geomspace(1e-30, 1, 500), -np.geomspace(1e-30, 1, 500)))
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        right = formula(x)
    found = gated(kernels, tmp_path, x, op_type=op_type)
    # The exponent's own rounding: a part in 2^24 of it, which is up to 2·√(2/π)·0.044715·x³.
    exponent = np.abs(x.astype(np.float64)) * (
        1 if op_type == "GatedSilu" else 1.6 + 0.0714 * x.astype(np.float64) ** 2
    )
    assert (np.abs(found - right) <= (6e-7 + 2e-7 * exponent) * np.abs(right) + 1e-36).all()
    exact = function(torch.from_numpy(x).double()).numpy()
    assert np.abs(exact - right).max() < 1e-13, "what it is compared with is PyTorch's function"


@pytest.mark.parametrize("op_type", ["GatedGeluTanh", "GatedSilu"])
def test_other_activations_at_the_ends(best: Runner, tmp_path: Path, op_type: str) -> None:
    output = gated(best, tmp_path, np.array([0.0, -0.0, np.nan, 1e30, -1e30], np.float32), op_type=op_type)
    assert np.array_equal(output, np.array([0, 0, np.nan, 1e30, 0], np.float32), equal_nan=True), output


def test_gelu_of_every_half(kernels: Runner, tmp_path: Path) -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    output = gated(kernels, tmp_path, every, "fp16")
    with np.errstate(invalid="ignore"):
        right = gelu(every)
        rounded = right.astype(np.float16)
    finite = np.isfinite(every)
    # One rounding of a number that is off by Φ's error.
    at = np.clip(np.abs(rounded[finite]), np.float16(2**-14), np.float16(6e4))
    spacing = np.spacing(at).astype(np.float64)
    error = np.abs(output[finite].astype(np.float64) - right[finite])
    assert (error <= 0.5 * spacing + 3e-7 * np.abs(every[finite].astype(np.float64))).all()
    assert np.isnan(output[np.isnan(every)]).all()


@pytest.mark.parametrize("element", ELEMENTS)
def test_gelu_at_the_ends(kernels: Runner, tmp_path: Path, element: str) -> None:
    """As PyTorch has it in float64: minus infinity times zero is not a number. In fp32 it makes infinity NaN too."""
    gate = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 6e4, -6e4], np.float32)
    with np.errstate(over="ignore"):
        gate = gate.astype(NUMPY[element])
    output = gated(kernels, tmp_path, gate, element)
    right = F.gelu(torch.from_numpy(gate).double()).numpy().astype(NUMPY[element])
    assert np.array_equal(output, right, equal_nan=True), (output, right)
    assert np.signbit(output[:2]).tolist() == [False, True]


def one_hot(weight: np.ndarray, streams: int) -> tuple[Case, Inputs]:
    """A call whose weights are tanh of the matrix's entries: a stream for each row, the unit vector of it."""
    dim, columns = weight.shape
    case = Case("ReadStreams", dim // streams, dim, streams)
    unit = np.eye(dim, dtype=np.float32).reshape(1, -1, streams, dim)
    ones = np.ones((streams, columns), np.float32)
    return case, {"streams": unit, "weight": weight, "gain": ones, "constant": 0 * ones}


def test_tanh_is_within_half_a_millionth(kernels: Runner, tmp_path: Path) -> None:
    streams, dim = 30, 960
    small = np.geomspace(1e-38, 1e-2, 1024)
    x = np.concatenate((np.linspace(-40, 40, dim * (streams + 2) - 2048), small, -small)).astype(np.float32)
    call = one_hot(x.reshape(dim, streams + 2), streams)
    (outputs,), _ = kernels(tmp_path, [call])
    # The first weight of every stream is not an output; it is what its one number is read with.
    read = outputs["read"].sum(axis=(0, 1))[:, None]
    found = np.concatenate((read, *(outputs[name].reshape(dim, -1) for name in ("mix", "beta"))), axis=1)
    exact = np.tanh(x.astype(np.float64)).reshape(dim, -1)
    assert np.abs(found - exact).max() < 5e-7
    assert found.min() == -1 and found.max() == 1


def test_streams_of_zeros(kernels: Runner, tmp_path: Path) -> None:
    """Their norm is 0, and their weights are what tanh(0) makes of them."""
    for streams, dim in itertools.product((1, 4, 5), (1, 16, 100)):
        case = Case("ReadStreams", 3, dim, streams)
        inputs = case.inputs()
        inputs["streams"][0, 1] = 0
        (outputs,), _ = kernels(tmp_path, [(case, inputs)])
        constant = inputs["constant"]
        assert np.array_equal(outputs["mix"][0, 1], constant[:, 1:-1])
        assert np.array_equal(outputs["beta"][0, 1], constant[:, -1:]) and not outputs["read"][0, 1].any()
        for name, right in expected("ReadStreams", inputs).items():
            np.testing.assert_allclose(outputs[name], right, atol=5e-6, rtol=0)


def test_norms_at_the_ends(kernels: Runner, tmp_path: Path) -> None:
    """Below 1e-12 the norm is 1e-12; huge streams keep their direction until their squares are infinite."""
    case = Case("ReadStreams", 8, 100, 4)
    inputs = case.inputs()
    sizes = np.array([1e-30, 1e-16, 1e-14, 1e-12, 1e-6, 1e6, 1e12, 1e17], np.float32)
    inputs["streams"] = np.abs(inputs["streams"]) * sizes[None, :, None, None]
    (outputs,), _ = kernels(tmp_path, [(case, inputs)])
    right = expected("ReadStreams", inputs)
    for name in ("mix", "beta"):
        np.testing.assert_allclose(outputs[name], right[name], atol=5e-6, rtol=0)
    np.testing.assert_allclose(outputs["read"] / sizes[:, None], right["read"] / sizes[:, None], atol=2e-5, rtol=0)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("op_type", OP_TYPES)
def test_what_is_no_number_stays_in_its_token(kernels: Runner, tmp_path: Path, op_type: str, poison: float) -> None:
    for dim in (6, 34):
        case = Case(op_type, 9, dim, batch=1)
        inputs = case.inputs()
        clean = kernels(tmp_path, [(case, inputs)])[0][0]
        for name in ("streams", "x", "value", "gate", "mix", "beta", "output"):
            if name not in inputs:
                continue
            spoilt = {**inputs, name: inputs[name].copy()}
            spoilt[name][0, 4].flat[0] = poison
            (outputs,), _ = kernels(tmp_path, [(case, spoilt)])
            others = np.arange(9) != 4
            for key, output in outputs.items():
                assert np.array_equal(output[0, others], clean[key][0, others]), (name, key)
            assert not all(np.isfinite(output[0, 4]).all() for output in outputs.values()), name


@pytest.mark.parametrize("op_type", OP_TYPES)
def test_numbers_do_not_depend_on_ranges_or_threads(kernels: Runner, tmp_path: Path, op_type: str) -> None:
    for element, first in itertools.product(FUSED_BY_OP_TYPE[op_type].dtypes, (False, True)):
        for streams, dim in ((4, 64), (3, 34)):
            whole = Case(op_type, 41, dim, streams, element, batch=2, heads_first=first)
            cut = [replace(whole, threads=threads, range=size) for threads, size in ((1, 1), (2, 7), (5, 19))]
            inputs = whole.inputs()
            (right, *others), said = kernels(tmp_path, [(case, inputs) for case in (whole, *cut)])
            assert said["tasks"][0] == 1 and all(tasks > 1 for tasks in said["tasks"][1:])
            for outputs in others:
                assert all(np.array_equal(outputs[name], right[name]) for name in right)


def test_nothing_to_compute(best: Runner, tmp_path: Path) -> None:
    cases = [Case(op_type, length=0) for op_type in OP_TYPES]
    assert check(best, tmp_path, cases)["tasks"] == [0] * len(cases)


def test_no_memory_is_told(best: Runner, tmp_path: Path) -> None:
    """By the two that need some; it is little, and none for tokens."""
    calls = [(case, case.inputs()) for case in (Case(op_type, 40, range=4) for op_type in OP_TYPES)]
    _, said = best(tmp_path, calls, DRIVE_NO_MEMORY="1")
    needy = [case for case, _ in calls if case.op_type in OF_STREAMS]
    assert said["without_memory"] == 10 * len(needy) and said["scratch"] == 0
    many = [(case, case.inputs()) for case in (Case("ReadStreams", 4000), Case("ReadStreams", 4, 2000))]
    _, said = best(tmp_path, many)
    assert 0 < said["scratch"] < 1 << 13


@settings(
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_cases(kernels: Runner, tmp_path: Path, data: st.DataObject) -> None:
    op_type = data.draw(st.sampled_from(OP_TYPES), "op_type")
    dim = data.draw(st.integers(1, 200), "dim")
    case = Case(
        op_type,
        data.draw(st.integers(1, 60), "length"),
        2 * dim if op_type in ROTATIONS else dim,
        data.draw(st.integers(1, 12), "streams"),
        data.draw(st.sampled_from(FUSED_BY_OP_TYPE[op_type].dtypes), "element"),
        batch=data.draw(st.integers(1, 3), "batch"),
        heads=data.draw(st.integers(1, 5), "heads"),
        heads_first=data.draw(st.booleans(), "heads_first"),
        own_positions=data.draw(st.booleans(), "own_positions"),
        threads=data.draw(st.integers(1, 4), "threads"),
        range=data.draw(st.integers(1, 100), "range"),
    )
    check(kernels, tmp_path, [case])


def test_on_the_other_processor(tmp_path: Path) -> None:
    """Emulated: numbers only."""
    arch: Arch = "aarch64" if host_arch() == "x86_64" else "x86_64"
    emulator(arch)
    runner = Runner(program(SOURCE, arch, "-O3"), arch)
    cases = [case for op_type in OP_TYPES for case in small(op_type)]
    said = check(runner, tmp_path, [*cases, Case("ReadStreams", 30, 256, threads=2, range=8)])
    assert said["isa"] == "neon" or arch == "x86_64"
    check(runner, tmp_path, cases, LOCALATTN_CPU_ISA="baseline")
    assert np.abs(gated(runner, tmp_path, np.linspace(-14, 14, 5001)) - gelu(np.linspace(-14, 14, 5001))).max() < 1e-5


def test_no_access_outside_the_tensors(tmp_path: Path) -> None:
    """Every tensor is a block of its own size."""
    executable = sanitized(SOURCE, "address,undefined", "-O0")  # compiled in half the time
    cases = [replace(case, threads=2, range=5) for op_type in OP_TYPES for case in small(op_type)]
    for name in INSTRUCTION_SETS:
        check(Runner(executable, host_arch(), with_instructions(name)), tmp_path, cases)


@pytest.mark.slow
def test_no_access_outside_tensors_of_any_size(tmp_path: Path) -> None:
    executable = sanitized(SOURCE, "address,undefined", "-O0")
    cases = [case for op_type in OF_STREAMS for case in of_streams(op_type)]
    cases += [case for element in ELEMENTS for case in (*rotations(element), *gates(element))]
    for name in INSTRUCTION_SETS:
        check(Runner(executable, host_arch(), with_instructions(name)), tmp_path, cases)


@pytest.mark.slow
def test_no_race(tmp_path: Path) -> None:
    cases = [replace(case, threads=4, range=2) for op_type in OP_TYPES for case in small(op_type)]
    check(Runner(sanitized(SOURCE, "thread"), host_arch()), tmp_path, cases)


@pytest.mark.parametrize("fault", ["tail", *(pytest.param(name, marks=pytest.mark.slow) for name in [*FAULTS][1:])])
def test_a_fault_is_seen(tmp_path: Path, fault: str) -> None:
    right, wrong, op_type = FAULTS[fault]
    sources = mutated(tmp_path, "fused.inl", right, wrong)
    runner = Runner(program(SOURCE, host_arch(), "-O0", sources=sources), host_arch())
    with pytest.raises(AssertionError, match="Not equal"):
        check(runner, tmp_path, [Case(op_type, dim=34 if op_type in ROTATIONS else 33, streams=8)])
