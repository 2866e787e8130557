"""The GPU kernel of step and chunk nodes against its definition in float64: in Triton's interpreter, and on a machine
for PTX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from localattn.core.nodes.step import ring_slots
from localattn.plugins.kernel.compile import AnySpec, CompiledKernel, compile_kernel
from localattn.plugins.kernel.ring import (
    BY_HEAD,
    BY_SEQUENCE,
    SHARED,
    pack_ring_scalars,
    plan,
    ring_specs_for,
)
from localattn.plugins.kernel.spec import Tile
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.kernel.tiles import tile_for

from ...support.native.kernel_worker import Worker
from ...support.native.ring_node import Arrays, Case
from ..simulators.ptx.launch import launch
from ..simulators.ptx.memory import GlobalMemory
from ..simulators.ptx.program import Program, read_program

pytest.importorskip("triton", reason="Triton compiles the kernel: pip install 'localattn[plugin]'")

BF16 = np.dtype(ml_dtypes.bfloat16)
TOLERANCE = {"fp32": 4e-6, "fp16": 2e-3, "bf16": 1.6e-2}
# 16-bit keys with scales are multiplied as TF32: each factor of a score is off by up to 2⁻¹¹ of its size.
XPOS_TOLERANCE = 6e-3
# Before the ring is full, in its first round, and when it has been overwritten many times.
EARLY, FIRST, LATE = 3, 8, 1_000_003
WIDE = {"window": 1100, "heads": 4, "kv_heads": 2}  # a ring that is split
CASES = [
    Case(1, EARLY),
    Case(1, LATE, exact=False, batch=3, heads=6),
    Case(1, LATE, dtype="float16", heads=6, batch=3, bias="padding"),
    Case(1, LATE, dtype="bfloat16", dim=24, heads=4, window=40),
    Case(1, FIRST, bias="heads", dim=21),
    Case(1, LATE, dtype="float16", heads=40, kv_heads=2, dim=64),
    Case(1, 700, dtype="float16", dim=64, **WIDE),
    Case(1, LATE, sinks=True, dtype="bfloat16", **WIDE),
    Case(1, LATE, xpos=True, kv_heads=2, window=40),
    Case(1, LATE, softcap=2.5, heads=4, dim=100, window=100),
    Case(5, EARLY, exact=False),
    Case(70, LATE, dtype="float16", dim=64, window=100),
    Case(40, LATE, heads=6, batch=3, bias="padding"),
    Case(40, FIRST, bias="heads", dim=21, dtype="float16"),
    Case(20, 400, dtype="float16", **WIDE),
    Case(9, LATE, dtype="bfloat16", heads=4, dim=40, window=33),
    Case(20, LATE, sinks=True, **WIDE),
    Case(33, LATE, xpos=True, kv_heads=2, dtype="float16", window=40),
    Case(33, LATE, softcap=2.5, heads=4, dim=24, window=40),
]
TARGETS_OF = ("sm_80", "sm_90", "sm_100", "sm_110", "sm_120")


def given(case: Case) -> Arrays:
    """Inputs as a file makes them: of bf16 ones, keys and caches are fp32 with bf16 numbers."""
    arrays = (replace(case, dtype="float32") if case.dtype == "bfloat16" else case).inputs()
    if case.dtype == "bfloat16":
        drawn = ("query", "key", "value", "key_cache", "value_cache", "sinks")
        arrays |= {name: arrays[name].astype(BF16).astype(np.float32) for name in drawn if name in arrays}
        arrays |= {name: arrays[name].astype(BF16) for name in ("query", "sinks") if name in arrays}
    return arrays


def dtype_of(case: Case) -> str:
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[case.dtype]


def judge(case: Case, arrays: Arrays, found: Sequence[Any]) -> None:
    expected = (replace(case, dtype="float32") if case.dtype == "bfloat16" else case).expected(arrays)
    tolerance = TOLERANCE[dtype_of(case)]
    if case.xpos and case.dtype != "float32":
        tolerance = max(tolerance, XPOS_TOLERANCE)
    output = np.asarray(found[0], np.float64)
    np.testing.assert_allclose(output, expected[0], atol=tolerance, rtol=tolerance, err_msg=f"{case}")
    for cache_, right in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(cache_, right, err_msg=f"{case}")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.close()


def tensor(array: Any) -> torch.Tensor:
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def interpreted(worker: Worker, case: Case, arrays: Arrays, tile: Tile | None = None) -> list[Any]:
    tensors = [tensor(x) for x in arrays.values()]
    found = worker("ring", case.variant, case.attributes, tensors, tile)
    return [x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy() for x in found]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_in_the_interpreter(worker: Worker, case: Case) -> None:
    arrays = given(case)
    judge(case, arrays, interpreted(worker, case, arrays))


@pytest.mark.parametrize("case", [Case(1, LATE, window=1100), Case(20, LATE, window=70)], ids=["step", "chunk"])
def test_a_query_that_sees_no_key_gets_the_mean_of_all(worker: Worker, case: Case) -> None:
    """As by the ONNX function; the keys it does not see are read for it then."""
    arrays = given(case)
    arrays["score_bias"][-1] = -2e30
    judge(case, arrays, interpreted(worker, case, arrays))


def test_what_no_query_sees_is_not_read(worker: Worker) -> None:
    """Slots that were never written to may hold anything, but those beside visible ones."""
    case = Case(20, 100, window=300)
    arrays = given(case)
    right = case.expected(arrays)
    for name in ("key_cache", "value_cache"):
        arrays[name][:, :, 128:256] = np.nan
    found = interpreted(worker, case, arrays)
    np.testing.assert_allclose(found[0], right[0], atol=4e-6)
    assert np.isnan(found[1]).any(), "the ring that is left has them still"


@cache
def compiled(target: str, spec: AnySpec, tile: Tile) -> tuple[CompiledKernel, Program]:
    kernel = compile_kernel(spec, TARGETS[target], tile)
    return kernel, read_program(kernel.ptx)


def launched(target: str, case: Case, arrays: Arrays, *, in_place: bool = False) -> list[Any]:
    """The outputs of launches as a driver launches them, NaN where nothing was written."""
    spec, join = ring_specs_for(case.variant, dtype_of(case), case.dim)
    slots = ring_slots(case.attributes.geometry)
    tile = tile_for(spec, TARGETS[target])
    sizes = {"tokens": case.rows, "slots": slots, "kv_heads": case.kv_heads}
    cut = plan(tile, batch=case.batch, group=case.heads // case.kv_heads, chunked=case.rows > 1, **sizes)
    kernel, program = compiled(target, spec, tile)
    memory = GlobalMemory()
    output = np.full_like(arrays["query"], np.nan)
    given = {name: memory.put(array.view(np.uint8)) for name, array in arrays.items()}
    caches = [arrays[name] if in_place else np.full_like(arrays[name], np.nan) for name in ("key_cache", "value_cache")]
    parts = np.full(max(cut.parts, 1) * (case.dim + 2), np.nan, np.float32)
    parts_at, output_at = memory.put(parts.view(np.uint8)), memory.put(output.view(np.uint8))
    following = [given["key_cache"], given["value_cache"]]
    if not in_place:
        following = [memory.put(x.view(np.uint8)) for x in caches]
    biases = {2: SHARED, 3: BY_HEAD, 4: BY_SEQUENCE}[arrays["score_bias"].ndim]
    scalars = pack_ring_scalars(case.attributes, cut, biases=biases, **sizes)
    arguments = [*given.values(), *scalars, parts_at, output_at, *following]
    launch(program, memory, cut.grid, (kernel.threads, 1, 1), kernel.shared_bytes, arguments)
    if cut.splits > 1:
        kernel, program = compiled(target, join, tile_for(join, TARGETS[target]))
        arguments = [parts_at, cut.rows, cut.splits, case.dim, output_at]
        launch(program, memory, cut.join_grid, (kernel.threads, 1, 1), kernel.shared_bytes, arguments)
    return [output, *caches]


# Targets change first: every 19th case is of another one.
@pytest.mark.parametrize("target", TARGETS_OF)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_of_the_compiled_kernel(target: str, case: Case) -> None:
    """Nothing outside of the tensors is read or written either: the machine would refuse it."""
    arrays = given(case)
    judge(case, arrays, launched(target, case, arrays))


@pytest.mark.parametrize("case", [CASES[6], CASES[2]], ids=str)
def test_a_ring_may_be_written_in_place(case: Case) -> None:
    arrays = given(case)
    expected = case.expected(arrays)
    output, *caches = launched("sm_80", case, arrays, in_place=True)
    np.testing.assert_allclose(np.asarray(output, np.float64), expected[0], atol=2e-3, rtol=2e-3)
    for found, right in zip(caches, expected[1:], strict=True):
        np.testing.assert_array_equal(found, right)
