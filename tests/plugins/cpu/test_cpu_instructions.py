"""How many instructions the compiled kernels take for their work: a guard that no busy machine disturbs.

valgrind counts them. It has no AVX-512, so the count is that of the AVX2 code, which is made from the same source.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest

from localattn.core.geometry import WindowGeometry
from localattn.core.machine.processor import host_arch

from ...support.native.cpu_program import program

LENGTH = 1024
# Window, exact; instructions of a query and a key it sees, measured and a tenth more. Of 64 channels eight sit in a
# register, so the two products alone are 16.
KEYS = {(64, True): 67, (256, True): 48, (256, False): 45}
TOKENS, STREAMS, DIM = 128, 4, 256
# Instructions for each of a token's 4 × 256 numbers, measured and a tenth more.
NUMBERS = {"read": 3.75, "mix": 2.12, "rotate": 1.65, "gelu": 5.65}


def instructions(source: str, *arguments: object) -> int:
    """What a program's work takes, beyond everything around it: its last argument says whether it works."""
    if platform.machine() != "x86_64":
        pytest.skip("the bounds are those of x86-64 code with AVX2")
    if shutil.which("g++") is None or shutil.which("valgrind") is None:
        pytest.skip("needs g++ and valgrind")
    executable = program(source, host_arch(), "-O3")
    with_work, without = (_counted([str(executable), *map(str, (*arguments, run))]) for run in (1, 0))
    return with_work - without


def _counted(command: list[str]) -> int:
    valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    finished = subprocess.run([*valgrind, *command], capture_output=True, text=True, check=True)
    if finished.stdout.strip() != "avx2":
        pytest.skip("this processor has no AVX2")
    counted = re.search(r"I +refs: +([\d,]+)", finished.stderr)
    assert counted, finished.stderr
    return int(counted[1].replace(",", ""))


@pytest.mark.parametrize(("window", "exact"), KEYS)
def test_instructions_of_a_visible_key(window: int, exact: bool) -> None:
    geometry = WindowGeometry(window, 1, 0, causal=True, exact_windowsize=exact)
    spent = instructions("count.cpp", LENGTH, window, int(exact))
    each = spent / (LENGTH * geometry.mean_visible_keys(LENGTH))
    assert 16 < each <= KEYS[window, exact]


@pytest.mark.parametrize("operator", NUMBERS)
def test_instructions_of_a_number(operator: str) -> None:
    each = instructions("count_fused.cpp", operator, TOKENS, DIM) / (TOKENS * STREAMS * DIM)
    assert NUMBERS[operator] / 2 < each <= NUMBERS[operator]
