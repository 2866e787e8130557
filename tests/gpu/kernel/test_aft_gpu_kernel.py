"""AFT-local's GPU kernel against its definition in float64: in Triton's interpreter, and on a machine for PTX."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from localattn.plugins.kernel import aft
from localattn.plugins.kernel.compile import CompiledKernel, compile_kernel
from localattn.plugins.kernel.targets import TARGETS

from ...support.models.aft_node import HARD, Arrays, Case, expected, finest
from ...support.native.kernel_worker import Worker
from ..simulators.ptx.launch import launch
from ..simulators.ptx.memory import GlobalMemory
from ..simulators.ptx.program import Program, read_program

pytest.importorskip("triton", reason="Triton compiles the kernel: pip install 'localattn[plugin]'")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.close()


def kinds(length: int, reach: int, **sizes: int) -> list[Case]:
    """Causal and not, with a mask and without."""
    return [Case(length, reach, causal, masked, **sizes) for causal in (False, True) for masked in (False, True)]


def interpreted(worker: Worker, case: Case, arrays: Arrays) -> np.ndarray:
    tensors = [torch.from_numpy(arrays[name]) for name in ("gate", "key", "value", "position_bias")]
    mask = torch.from_numpy(arrays["key_mask"]) if case.masked else None
    output: np.ndarray = worker("aft", *tensors, mask, case.causal).numpy()
    return output


def judge(output: np.ndarray, case: Case, arrays: Arrays) -> None:
    np.testing.assert_allclose(output, expected(case, arrays), atol=finest(arrays), rtol=1e-5, err_msg=f"{case}")


# Less than a tile of queries, several; biases of one key, of a part of the sequence, of all.
SIZES = [(1, 0), (5, 4), (70, 6), (97, 15), (150, 149), (300, 20)]
# In the default run; the others take seconds each.
FAST = 70


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (n > FAST))
        for n, r in SIZES
        for case in kinds(n, r, batch=1 + (n > FAST) * n % 2, dim=37 if n > FAST else 5)
    ],
)
def test_every_size(worker: Worker, case: Case) -> None:
    arrays = case.inputs()
    judge(interpreted(worker, case, arrays), case, arrays)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        pytest.param(case, change, id=f"{change}-{case}", marks=[pytest.mark.slow] * (case.masked or change != "spike"))
        for change in HARD
        for case in kinds(105, 7, dim=5)
    ],
)
def test_hard_numbers(worker: Worker, case: Case, change: str) -> None:
    """Keys that rise, fall and spike by more than fp32's exponents hold, and biases of any width."""
    arrays = case.inputs(change=change)
    judge(interpreted(worker, case, arrays), case, arrays)


def test_what_is_not_seen_reaches_no_row(worker: Worker) -> None:
    for case in (Case(80, 9, causal=True, dim=5), Case(80, 9, masked=True, dim=5)):
        arrays = case.inputs()
        hidden = np.arange(80) >= 50
        if case.masked:
            arrays["key_mask"] = ~hidden[None]
        right = expected(case, arrays)
        arrays["value"][hidden], arrays["key"][hidden] = np.inf, np.nan
        seen = ~hidden if case.causal else slice(None)
        np.testing.assert_allclose(interpreted(worker, case, arrays)[seen], right[seen], atol=1e-5)


def test_a_row_that_sees_nothing_is_zero(worker: Worker) -> None:
    case = Case(70, 3, causal=True, masked=True, dim=4)
    arrays = case.inputs()
    arrays["key_mask"][:, :40] = False
    output = interpreted(worker, case, arrays)
    judge(output, case, arrays)
    assert not output[:40].any() and output[45:].any()


@cache
def compiled(target: str, case: tuple[bool, bool]) -> tuple[CompiledKernel, Program]:
    kernel = compile_kernel(aft.AftSpec(*case), TARGETS[target])
    return kernel, read_program(kernel.ptx)


@pytest.mark.parametrize(
    ("target", "case"),
    [
        pytest.param(target, case, marks=[pytest.mark.slow] * (target != "sm_80" or case.causal != case.masked))
        for target in ("sm_80", "sm_90", "sm_100", "sm_120")
        for case in kinds(75, 6, batch=2, dim=37)
    ],
    ids=str,
)
def test_numbers_of_the_compiled_kernel(target: str, case: Case) -> None:
    """Nothing outside of the tensors is read or written either: the machine would refuse it."""
    kernel, program = compiled(target, (case.causal, case.masked))
    assert kernel.spills == 0 and kernel.shared_bytes <= 48 << 10
    arrays = case.inputs(change="spike")
    memory, output = GlobalMemory(), np.full_like(arrays["gate"], np.nan)
    inputs = [memory.put(array.view(np.uint8)) for array in arrays.values()]
    arguments = [*inputs, case.length, case.batch, case.dim, case.reach, memory.put(output.view(np.uint8))]
    grid = aft.grid(kernel.tile, case.length, case.batch, case.dim)
    launch(program, memory, grid, (kernel.threads, 1, 1), kernel.shared_bytes, arguments)
    judge(output, case, arrays)
