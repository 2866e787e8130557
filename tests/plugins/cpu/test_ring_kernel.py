"""The CPU kernels of the step and chunk nodes in onnxruntime, against the definition in float64 and the ONNX function."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ...support.models.ring_node import OUTPUTS, Case
from ...support.native.cpu_build import library

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
VARIED = [replace(Case(rows, at), **option) for rows in (1, 40) for at in (3, 300) for option in OPTIONS]


def run(case: Case, arrays: dict[str, Any], *, kernel: bool, threads: int = 3) -> list[Any]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if kernel:
        options.register_custom_ops_library(library())
    model = case.model(arrays, function=not kernel)
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
    for case in (*STEPS, *CHUNKS, *VARIED):
        arrays = case.inputs()
        close(case, run(case, arrays, kernel=kernel), case.expected(arrays))


def test_a_query_that_sees_no_key_gets_the_mean_of_all() -> None:
    for rows in (1, 40):
        case = Case(rows, 30)
        arrays = case.inputs()
        arrays["score_bias"][-1] = -2e30
        found = run(case, arrays, kernel=True)
        close(case, found, case.expected(arrays))


@pytest.mark.parametrize("isa", ["avx512", "avx2", "baseline"])
def test_instruction_sets(isa: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """In a process of its own, because a library chooses once."""
    import os
    import subprocess
    import sys

    script = f"from {__name__} import check; check()"
    environment = {**os.environ, "LOCALATTN_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def check() -> None:
    for case in VARIED:
        arrays = case.inputs()
        close(case, run(case, arrays, kernel=True), case.expected(arrays))
