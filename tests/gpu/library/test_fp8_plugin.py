"""Attention in fp8 in the plugin library: types, and a launch repeated on the machine for PTX."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localattn.core.errors import UsageError
from localattn.core.nodes.attention import HEADS_FIRST
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.kernel.tiles import tile_for
from localattn.plugins.library.build import build_library
from localattn.plugins.library.sidecar import host_arch

from ...support.native import fp8_attention as fp8
from ...support.native.kernel_cases import Case
from ...support.native.plugin_build import FP8, HEAD_DIM
from ...support.native.plugin_drive import BATCH, CASES, HEADS, LENGTH, Driven, drive, fields_of
from ..simulators.ptx.launch import launch
from ..simulators.ptx.memory import GlobalMemory
from ..simulators.ptx.program import read_program

pytest.importorskip("triton", reason="Triton compiles the kernels: pip install 'localattn[plugin]'")

ATTRIBUTES = replace(CASES["block-local"], scale=HEAD_DIM**-0.5 * 2**-8)
SHAPE = tuple((BATCH, HEADS, LENGTH, HEAD_DIM)[axis] for axis in HEADS_FIRST)


def driven_on(capability: int, tmp_path: Path) -> Driven:
    return drive(
        tmp_path, "WindowedAttentionMask", fields_of(ATTRIBUTES), dtype="fp8", shape=SHAPE, capability=capability
    )


def test_a_launch_repeated(tmp_path: Path) -> None:
    driven = driven_on(89, tmp_path)
    assert all(driven.shown["supported"]) and driven.shown["configure"] == 0 and driven.shown["enqueue"] == [0, 0]
    call = driven.launches[0]
    assert call["ptx"] and call["entry"] == FP8.name
    rng, memory = np.random.default_rng(4), GlobalMemory()
    numbers = [fp8.quantised(rng.standard_normal(SHAPE), 2**-4) for _ in range(3)]
    mask, output = rng.random((BATCH, LENGTH)) < 0.7, np.full(SHAPE, np.nan, np.float16)
    bits = [x.astype(fp8.E4M3).view(np.uint8) for x in numbers]
    for array, address in zip([*bits, mask, output], [*call["inputs"], call["output"]], strict=True):
        memory.put(array, address)
    arguments = [*call["inputs"], *call["scalars"], call["output"]]
    launch(read_program(driven.ptx), memory, call["grid"], call["block"], call["shared"], arguments)
    case = Case(ATTRIBUTES.geometry, LENGTH, HEAD_DIM, "fp8", perm=HEADS_FIRST, scale=ATTRIBUTES.scale, mask=True)
    right = fp8.attention(case, *numbers, mask, tile_for(FP8, TARGETS["sm_89"]), half=True)
    wrong = np.abs(output.astype(np.float64) - right) / np.abs(numbers[2]).max()
    assert np.quantile(wrong, 0.995) < 1.5e-3 and wrong.max() < 3e-2


def test_a_library_for_gpus_without_fp8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="None of these kernels runs on sm_80, sm_87") as refused:
        build_library(tmp_path / "x.so", specs=[FP8], targets=[TARGETS["sm_80"], TARGETS["sm_87"]], arch=host_arch())
    assert "sm_89 or later" in refused.value.why and not list(tmp_path.iterdir())


def test_a_gpu_without_fp8_has_no_kernel(tmp_path: Path) -> None:
    driven = driven_on(86, tmp_path)
    assert driven.shown["enqueue"] == [-1, -1]
    assert "no kernel for fp8, head size 64, key mask on compute capability 8.6" in driven.messages
