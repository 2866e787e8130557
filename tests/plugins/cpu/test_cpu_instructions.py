"""How many instructions the compiled kernels take for their work: a guard that no busy machine disturbs.

valgrind counts those of AVX2 and of any processor. It has no AVX-512: there the program takes one step at a time under
a tracer. An emulator logs those of NEON.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial

import pytest

from localattn.core.geometry import WindowGeometry
from localattn.core.machine.processor import host_arch

from ...support.native.cpu_program import program, tool, with_instructions
from ...support.native.plugin_build import emulator

# Instruction set → window, exact: instructions of a query and a key it sees, measured and a tenth more. With as many
# lanes as floats fit into a register, the two products of 64 channels alone are 128 / lanes multiply-adds.
LANES = {"avx512": 16, "avx2": 8, "neon": 4, "baseline": 4}
KEYS = {
    "avx512": {(64, True): 40},
    "avx2": {(64, True): 60, (256, True): 46, (256, False): 44},
    "neon": {(64, True): 97},
    "baseline": {(64, True): 187, (256, True): 166},
}
# Counting step by step takes its time.
LENGTHS = {"avx512": 128, "neon": 192}
TOKENS, STREAMS, DIM = 128, 4, 256
# Instructions for each of a token's 4 × 256 numbers, measured and a tenth more.
NUMBERS = {"read": 3.75, "mix": 2.12, "mix-read": 9.6, "rotate": 1.65, "gelu": 5.65}
# Instruction set and tokens a call → instructions of a query and a key of a full ring, measured and a tenth more. Short
# rings, where counting takes its time, spread what a call takes once over fewer keys.
RINGS = {
    ("avx512", 1): 96, ("avx2", 1): 83, ("neon", 1): 180, ("baseline", 1): 208,
    ("avx512", 16): 71, ("avx2", 64): 54, ("neon", 16): 123, ("baseline", 64): 192,
}  # fmt: skip
SLOTS = {1: {"avx512": 257, "neon": 257}, 16: {"avx512": 129, "neon": 129}}


def instructions(source: str, *arguments: object, isa: str = "avx2") -> int:
    """What a program's work takes by valgrind, beyond everything around it: its last argument says whether it works."""
    if platform.machine() != "x86_64":
        pytest.skip("the bounds are those of x86-64 code")
    if shutil.which("g++") is None or shutil.which("valgrind") is None:
        pytest.skip("needs g++ and valgrind")
    executable = program(source, host_arch(), "-O3")
    with_work, without = (_counted([str(executable), *map(str, (*arguments, run))], isa) for run in (1, 0))
    return with_work - without


def _counted(command: list[str], isa: str) -> int:
    valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    environment = {**os.environ, **dict(with_instructions(isa))}
    finished = subprocess.run([*valgrind, *command], env=environment, capture_output=True, text=True, check=True)
    if finished.stdout.strip() != isa:
        pytest.skip(f"this processor has no {isa}")
    counted = re.search(r"I +refs: +([\d,]+)", finished.stderr)
    assert counted, finished.stderr
    return int(counted[1].replace(",", ""))


def steps(source: str, *arguments: object) -> int:
    """What a program's work takes with AVX-512, step by step."""
    if host_arch() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("needs g++ on an x86-64 processor")
    executable, tracer = program(source, host_arch(), "-O3"), tool("steps.cpp")
    command = [str(tracer), str(executable), *map(str, (*arguments, 2))]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode == 77:
        pytest.skip("this system lets no process trace another")
    assert finished.returncode == 0, finished.stderr
    if finished.stdout.strip() != "avx512":
        pytest.skip("this processor has no AVX-512")
    return int(finished.stderr)


def emulated(source: str, *arguments: object) -> int:
    """What a program's work takes with NEON: an emulator logs a line for each instruction."""
    executable = program(source, "aarch64", "-O3")
    command = [*emulator("aarch64"), "-singlestep", "-d", "nochain,exec", str(executable), *map(str, arguments)]
    if len(command) < 6 + len(arguments):
        pytest.skip("the processor itself runs NEON, and logs nothing")
    counts = []
    for run in (1, 0):
        with subprocess.Popen([*command, str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            counts.append(sum(line.startswith(b"Trace") for line in process.stderr))
            assert process.stdout.read().strip() == b"neon"
    return counts[0] - counts[1]


def counter(isa: str) -> Callable[..., int]:
    """What counts the instructions of a set."""
    return {"avx512": steps, "neon": emulated}.get(isa) or partial(instructions, isa=isa)


COUNTED = [(isa, window, exact) for isa, bounds in KEYS.items() for window, exact in bounds]


@pytest.mark.parametrize(("isa", "window", "exact"), COUNTED)
def test_instructions_of_a_visible_key(isa: str, window: int, exact: bool) -> None:
    length = LENGTHS.get(isa, 1024)
    geometry = WindowGeometry(window, 1, 0, causal=True, exact_windowsize=exact)
    each = counter(isa)("count.cpp", length, window, int(exact)) / (length * geometry.mean_visible_keys(length))
    assert 2 * 64 / LANES[isa] < each <= KEYS[isa][window, exact]


@pytest.mark.parametrize("operator", NUMBERS)
def test_instructions_of_a_number(operator: str) -> None:
    each = instructions("count_fused.cpp", operator, TOKENS, DIM) / (TOKENS * STREAMS * DIM)
    assert NUMBERS[operator] / 2 < each <= NUMBERS[operator]


@pytest.mark.parametrize(("isa", "rows"), RINGS)
def test_instructions_of_a_key_of_the_ring(isa: str, rows: int) -> None:
    slots = SLOTS.get(rows, {}).get(isa, 1025)
    each = counter(isa)("count_ring.cpp", rows, slots, 64) / (rows * slots)
    assert 2 * 64 / LANES[isa] < each <= RINGS[isa, rows]
