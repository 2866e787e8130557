"""AFT-local's CPU kernel against its definition in float64, for every instruction set this machine can run."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from localattn.core.machine.processor import Arch, host_arch

from ...support.models.aft_node import HARD, Case, expected, feed, finest
from ...support.native.cpu_build import library
from ...support.native.cpu_program import INSTRUCTION_SETS, mutated, program, sanitized
from ...support.native.plugin_build import emulator

SOURCE = "mean.cpp"
# Less than a row of products, several; less than a tile of rows, several; biases of one key, of all, in between.
SIZES = [(1, 0), (2, 1), (5, 4), (33, 2), (97, 15), (130, 129), (250, 40)]
DIMS = (1, 16, 37, 70)


def cases(sizes: Iterable[tuple[int, int]], dims: Iterable[int]) -> list[Case]:
    """Causal and not, with a mask and without."""
    grid = itertools.product(sizes, dims, (False, True), (False, True))
    return [Case(n, r, causal, masked, batch=1 + n % 2, dim=d) for (n, r), d, causal, masked in grid]


def run(executable: Path, case: Case, arrays: dict, folder: Path, arch: Arch, isa: str) -> np.ndarray:
    """The output of one call of the program."""
    for name, array in arrays.items():
        array.tofile(folder / name)
    sizes = (case.length, case.batch, case.dim, case.columns, int(case.causal), int(case.masked), 1)
    command = [*emulator(arch), str(executable), str(folder), *map(str, sizes)]
    environment = {**os.environ, "LOCALATTN_CPU_ISA": isa}
    said = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert said.strip() == isa
    return np.fromfile(folder / "output", np.float32).reshape(arrays["gate"].shape)


def check(executable: Path, case: Case, folder: Path, isa: str, change: str = "", arch: Arch | None = None) -> None:
    arrays = case.inputs(change=change)
    output = run(executable, case, arrays, folder, arch or host_arch(), isa)
    np.testing.assert_allclose(output, expected(case, arrays), atol=finest(arrays), rtol=1e-5, err_msg=f"{case}")


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_every_size(isa: str, tmp_path: Path) -> None:
    executable = program(SOURCE, host_arch(), "-O3")
    for case in cases(SIZES, DIMS if isa == INSTRUCTION_SETS[0] else DIMS[2:3]):
        check(executable, case, tmp_path, isa)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_hard_numbers(isa: str, tmp_path: Path) -> None:
    executable = program(SOURCE, host_arch(), "-O3")
    for change, case in itertools.product(HARD, cases([(140, 7)], [21])):
        check(executable, case, tmp_path, isa, change)


def test_in_onnxruntime() -> None:
    """As the node of a model, on several threads."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.register_custom_ops_library(library())
    options.intra_op_num_threads = 3
    for case in cases([(1, 0), (200, 9)], [70]):
        arrays = case.inputs()
        model = case.model(arrays, function=False)
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(session.run(None, feed(arrays))[0], expected(case, arrays), atol=1e-5)


def test_wrong_shapes_are_refused() -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.register_custom_ops_library(library())
    options.log_severity_level = 4
    case = Case(9, 2)
    arrays = case.inputs()
    for name, wrong in (
        ("position_bias", arrays["position_bias"][:, 1:]),
        ("position_bias", arrays["position_bias"][1:]),
        ("key", arrays["key"][1:]),
        ("gate", arrays["gate"][:, :, 0]),
    ):
        given = {**arrays, name: wrong}
        with pytest.raises(Exception, match=name):  # when the file is loaded, or at the call
            model = case.model(given, function=False, bias_given=True)
            ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, given)


def test_what_is_not_seen_reaches_no_row(tmp_path: Path) -> None:
    """Neither later keys and values nor those that a mask hides, whatever they are."""
    executable = program(SOURCE, host_arch(), "-O3")
    for case in (Case(150, 9, causal=True, dim=20), Case(150, 9, masked=True, dim=20)):
        arrays = case.inputs()
        hidden = np.arange(150) >= 100
        if case.masked:
            arrays["key_mask"] = ~hidden[None]
        right = expected(case, arrays)
        arrays["value"][hidden], arrays["key"][hidden] = np.inf, np.nan
        output = run(executable, case, arrays, tmp_path, host_arch(), INSTRUCTION_SETS[0])
        seen = ~hidden if case.causal else slice(None)
        np.testing.assert_allclose(output[seen], right[seen], atol=1e-5)


def test_on_the_other_processor(tmp_path: Path) -> None:
    """Emulated."""
    arch: Arch = "aarch64" if host_arch() == "x86_64" else "x86_64"
    emulator(arch)
    executable = program(SOURCE, arch, "-O3")
    for case in cases([(33, 2), (130, 40)], [37]):
        check(executable, case, tmp_path, "neon" if arch == "aarch64" else "baseline", arch=arch)


@pytest.mark.slow
def test_no_access_outside_the_tensors(tmp_path: Path) -> None:
    executable = sanitized(SOURCE, "address,undefined", "-O0")
    for isa in INSTRUCTION_SETS:
        for case in cases([(1, 0), (97, 15), (130, 129)], [37]):
            check(executable, case, tmp_path, isa)


def test_a_fault_is_seen(tmp_path: Path) -> None:
    """Without the careful rows a later spike spoils the rows before it."""
    sources = mutated(tmp_path, "aft.inl", "if (any_lane(wrong))", "if (false)")
    executable = program(SOURCE, host_arch(), "-O0", sources=sources)
    with pytest.raises(AssertionError, match="Not equal"):
        check(executable, Case(140, 7, causal=True, dim=21), tmp_path, INSTRUCTION_SETS[0], "steep")
