"""How many instructions the compiled kernel takes for a visible key: a guard that no busy machine disturbs.

valgrind counts them. It has no AVX-512, so the count is that of the AVX2 code, which is made from the same source. Of
64 channels eight sit in a register, so the two products alone are 16 instructions a query and key.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from localattn.core.geometry import WindowGeometry

from .plugin_build import SOURCES as PROGRAMS

SOURCES = Path(__file__).parents[1] / "plugins" / "cpu" / "source"
LENGTH = 1024
# Window, exact; instructions of a query and a key it sees, measured and a tenth more.
BOUNDS = {(64, True): 67, (256, True): 48, (256, False): 45}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if platform.machine() != "x86_64":
        pytest.skip("the bounds are those of x86-64 code with AVX2")
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("valgrind") is None:
        pytest.skip("needs g++ and valgrind")
    output = tmp_path_factory.mktemp("count") / "count"
    files = [*sorted(SOURCES.glob("*.cpp")), PROGRAMS / "count.cpp"]
    subprocess.run([compiler, "-std=c++17", "-O3", f"-I{SOURCES}", *map(str, files), "-o", output], check=True)
    return output


def instructions(program: Path, window: int, *, exact: bool, run: bool) -> int:
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", str(program)]
    command += map(str, (LENGTH, window, int(exact), int(run)))
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    if finished.stdout.strip() != "avx2":
        pytest.skip("this processor has no AVX2")
    counted = re.search(r"I +refs: +([\d,]+)", finished.stderr)
    assert counted, finished.stderr
    return int(counted[1].replace(",", ""))


@pytest.mark.parametrize(("window", "exact"), BOUNDS)
def test_instructions_of_a_visible_key(program: Path, window: int, exact: bool) -> None:
    geometry = WindowGeometry(window, 1, 0, causal=True, exact_windowsize=exact)
    spent = instructions(program, window, exact=exact, run=True) - instructions(program, window, exact=exact, run=False)
    each = spent / (LENGTH * geometry.mean_visible_keys(LENGTH))
    assert 16 < each <= BOUNDS[window, exact]
