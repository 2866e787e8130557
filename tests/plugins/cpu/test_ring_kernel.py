"""The CPU kernels of the step and chunk nodes in onnxruntime, and their ONNX functions, against float64."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localattn.plugins.library.sidecar import Arch, host_arch

from ...support.native.cpu_build import library
from ...support.native.cpu_program import INSTRUCTION_SETS, program
from ...support.native.plugin_build import emulator
from ...support.native.ring_node import OUTPUTS, Case

TOLERANCE = {"float32": 3e-6, "float16": 2e-3}
# Before the ring is full, in its first round and later; steps and chunks of less than a tile, of several.
POSITIONS = (0, 5, 8, 37)
STEPS = [Case(1, at, exact=exact, batch=2) for at in POSITIONS for exact in (True, False)]
CHUNKS = [Case(rows, at, exact=exact) for rows in (2, 70) for at in POSITIONS for exact in (True, False)]
OPTIONS: list[dict[str, Any]] = [
    {"xpos": True},
    {"bias": "heads"},
    {"heads": 6, "kv_heads": 2, "batch": 3, "bias": "padding"},
    {"heads": 4, "kv_heads": 1, "softcap": 2.5, "sinks": True},
    {"sinks": True, "dim": 21},
    {"softcap": 3.0, "dim": 136, "window": 130},
    {"dtype": "float16", "heads": 4, "kv_heads": 2},
    {"dtype": "float16", "dim": 70, "window": 1},
]
# Rings of several blocks of keys, of which some are empty, and some no tile sees.
LARGE = [Case(70, at, exact=True, window=2000, heads=4, kv_heads=2) for at in (10, 1500)]
# Rings that a step takes in several pieces, of which some have no key that is seen, or one. The last has rows so long,
# and so many, that memory is asked for ahead.
LONG: list[dict[str, Any]] = [
    {"position": 40, "heads": 4, "kv_heads": 1},
    {"position": 7000, "exact": False, "heads": 4, "softcap": 2.5, "sinks": True},
    {"position": 2700, "batch": 2, "kv_heads": 1, "bias": "padding"},
    {"window": 1700, "xpos": True},
    {"window": 1700, "bias": "heads"},
    {"dtype": "float16", "heads": 3, "kv_heads": 1},
    {"position": 1300, "window": 1100, "heads": 3, "kv_heads": 1, "dim": 136},
]
PIECES = [replace(Case(1, 4000, window=3000, dim=24), **option) for option in LONG]
VARIED = [replace(Case(rows, at), **option) for rows in (1, 40) for at in (3, 300) for option in OPTIONS]


def run(case: Case, arrays: dict[str, Any], kernels: str | None, threads: int = 3) -> list[Any]:
    """The outputs, of the library's kernel or of the ONNX function."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if kernels:
        options.register_custom_ops_library(kernels)
    model = case.model(arrays, function=not kernels)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(list(OUTPUTS), arrays)
    return found


def close(case: Case, found: list[Any], expected: Any) -> None:
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(found[0], expected[0], atol=tolerance, rtol=tolerance, err_msg=f"{case}")
    for cache, right in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(cache, right, err_msg=f"{case}")


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "function"])
def test_every_option(kernel: bool) -> None:
    for case in (*STEPS, *CHUNKS, *LARGE, *PIECES, *VARIED):
        arrays = case.inputs()
        close(case, run(case, arrays, library() if kernel else None), case.expected(arrays))


def test_a_query_that_sees_no_key_gets_the_mean_of_all() -> None:
    for case in (Case(1, 30), Case(40, 30), LARGE[0], PIECES[0], PIECES[4]):
        arrays = case.inputs()
        arrays["score_bias"][-1] = -2e30
        found = run(case, arrays, library())
        close(case, found, case.expected(arrays))


def test_threads_change_no_bit() -> None:
    for case in PIECES[:2]:
        arrays = case.inputs()
        alone, shared = (run(case, arrays, library(), threads) for threads in (1, 3))
        for left, right in zip(alone, shared, strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS[1:])
def test_slower_instruction_sets(isa: str) -> None:
    """In a process of its own, because a library chooses once."""
    script = "import sys; from localattn.tests.plugins.cpu.test_ring_kernel import check; check(sys.argv[1])"
    environment = {**os.environ, "LOCALATTN_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script, library()], env=environment, check=True)


def check(kernels: str) -> None:
    """Every option, as `test_every_option`."""
    for case in (*PIECES, *VARIED):
        arrays = case.inputs()
        close(case, run(case, arrays, kernels), case.expected(arrays))


def test_on_the_other_processor() -> None:
    """Emulated, without onnxruntime: a step and chunks of a full ring, with a cap and a sink too."""
    arch: Arch = "aarch64" if host_arch() == "x86_64" else "x86_64"
    command = [*emulator(arch), str(program("count_ring.cpp", arch, "-O3"))]
    for rows, slots, dim in ((1, 1025, 64), (1, 37, 21), (1, 1500, 48), (2, 130, 136), (64, 300, 64), (70, 9, 21)):
        for mode in (3, 4):
            arguments = map(str, (rows, slots, dim, mode))
            isa, error = subprocess.run(
                [*command, *arguments], capture_output=True, text=True, check=True
            ).stdout.split()
            assert isa == ("neon" if arch == "aarch64" else "baseline")
            assert float(error) <= 1e-6, (rows, slots, dim, mode)


REFUSED = [
    ("query", (2, 2, 16), "query has shape"),
    ("key", (1, 2, 1, 15), "key has shape"),
    ("value", (1, 1, 1, 16), "value has shape"),
    ("key_cache", (1, 2, 9), "key_cache has shape"),
    ("value_cache", (1, 2, 8, 16), "value_cache has shape"),
    ("score_bias", (1, 8), "score_bias has shape"),
    ("write_index", (1, 2, 3), "write_index has shape"),
]


@pytest.mark.parametrize(("name", "shape", "message"), REFUSED)
def test_wrong_shapes_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    case = Case(1, 30)
    arrays = case.inputs()
    arrays[name] = np.zeros(shape, arrays[name].dtype)
    with pytest.raises(Exception, match=message):
        run(case, arrays, library())


@pytest.mark.parametrize("rows", [1, 4])
def test_places_outside_of_the_ring_are_refused(rows: int) -> None:
    case = Case(rows, 30)
    for wrong in (-1, 9 + rows):
        arrays = case.inputs()
        arrays["write_index"].flat[2] = wrong
        with pytest.raises(Exception, match="write_index"):
            run(case, arrays, library())


def run_in_place(case: Case, arrays: dict[str, Any], in_place: tuple[str, ...]) -> list[Any]:
    """The outputs of the library's kernel, where these caches are input and output at once."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(library())
    session = ort.InferenceSession(case.model(arrays, function=False), options, providers=["CPUExecutionProvider"])
    values = {name: ort.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in arrays.items()}
    outputs = [
        values[name] if name in in_place else ort.OrtValue.ortvalue_from_numpy(np.zeros_like(arrays[name]))
        for name in ("query", "key_cache", "value_cache")
    ]
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in zip(OUTPUTS, outputs, strict=True):
        binding.bind_ortvalue_output(name, value)
    session.run_with_iobinding(binding)
    return [value.numpy().copy() for value in outputs]  # it lies in the values


IN_PLACE = [("key_cache", "value_cache"), ("key_cache",), ("value_cache",)]


@pytest.mark.parametrize("in_place", IN_PLACE, ids="+".join)
def test_one_buffer_may_be_cache_and_next_cache(in_place: tuple[str, ...]) -> None:
    """A step writes one row of it."""
    case = Case(1, 30, batch=2)
    arrays = case.inputs()
    close(case, run_in_place(case, arrays, in_place), case.expected(arrays))


@pytest.mark.parametrize("in_place", IN_PLACE, ids="+".join)
def test_a_chunk_moves_no_key_within_one_buffer(in_place: tuple[str, ...]) -> None:
    """What a slot holds would be gone before another takes it."""
    case = Case(4, 30)
    arrays = case.inputs()
    arrays["write_index"] = np.roll(np.arange(arrays["write_index"].size), 1)
    close(case, run(case, arrays, library()), case.expected(arrays))
    with pytest.raises(Exception, match="moves key 8 within a ring that is input and output at once"):
        run_in_place(case, arrays, in_place)
