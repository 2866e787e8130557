"""What is told of the kernels that a plugin library has loaded: by `run`, `inspect` and `doctor`, on the stand-in for
CUDA's driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localattn.core.documents.engine_sidecar import KernelName
from localattn.doctor.probe_process import __file__ as probe_process
from localattn.plugins.library.sidecar import host_arch
from localattn.runtime.backends.tensorrt.kernels import ELEMENTS

from ...support.native.plugin_build import DTYPE, HEAD_DIM, library, stand_in_driver

# What `inspect` and then `run` do with an open engine's library.
PROGRAM = """
import ctypes, json, sys
from localattn.core.documents.engine_sidecar import KernelName
from localattn.runtime.backends.tensorrt.device import primary_context
from localattn.runtime.backends.tensorrt.kernels import load_kernels, loaded_kernels
library = ctypes.CDLL(sys.argv[1])
shown = {"before": loaded_kernels(library)}
wanted = [KernelName(**kernel) for kernel in json.loads(sys.argv[2])]
with primary_context():
    shown["loaded"] = load_kernels(library, wanted)
shown["after"] = loaded_kernels(library)
print(json.dumps(shown))
"""


def environment(capability: int) -> dict[str, str]:
    import localattn

    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(stand_in_driver(host_arch())),
        "FAKE_CUDA_LOG": os.devnull,
        "FAKE_CUDA_CAPABILITY": str(capability),
        "PYTHONPATH": str(Path(localattn.__path__[0]).parent),
    }


def ask(capability: int, *kernels: KernelName) -> dict[str, Any]:
    wanted = json.dumps([kernel.model_dump() for kernel in kernels])
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library(host_arch()).path), wanted],
        env=environment(capability),
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


def test_machine_code_and_ptx_are_told_apart() -> None:
    kernels = [KernelName(dtype=DTYPE, head_dim=HEAD_DIM), KernelName(dtype=DTYPE, head_dim=HEAD_DIM, has_mask=True)]
    shown = ask(90, *kernels)
    assert shown["before"] == []
    assert shown["loaded"] == [
        "fp16, head size 64: machine code of sm_90",
        "fp16, head size 64, key mask: machine code of sm_90",
    ]
    assert sorted(shown["after"]) == sorted(shown["loaded"])
    (line,) = ask(89, kernels[0])["loaded"]
    assert line.startswith("fp16, head size 64: PTX of sm_86, compiled by the driver for compute capability 8.9")


def test_kernel_that_cannot_be_loaded_says_why() -> None:
    shown = ask(90, KernelName(dtype="bf16", head_dim=HEAD_DIM))
    assert shown["after"] == []
    (line,) = shown["loaded"]
    assert line.startswith("not loaded: no kernel for bf16, head size 64 on compute capability 9.0")


@pytest.mark.parametrize(
    ("capability", "status", "said"),
    [(86, "ok", "machine code of sm_86"), (120, "limited", "PTX of sm_86"), (80, "broken", "no kernel for fp16")],
)
def test_doctor_loads_kernels(capability: int, status: str, said: str) -> None:
    path = str(library(host_arch()).path)
    finished = subprocess.run(
        [sys.executable, probe_process, "kernels", path, path, f"{DTYPE}:{HEAD_DIM}"],
        env=environment(capability),
        capture_output=True,
        text=True,
    )
    answer = json.loads(finished.stdout)
    assert answer["status"] == status, answer
    assert said in " ".join([answer["detail"], *answer.get("items", ())])


def test_elements_have_the_numbers_of_the_library() -> None:
    import localattn

    header = Path(localattn.__path__[0], "plugins/library/source/kernels/kernels.h").read_text()
    numbers = ", ".join(f"k{dtype.upper()} = {number}" for dtype, number in ELEMENTS.items())
    assert f"enum class Element : int32_t {{ {numbers} }};" in header
