"""What the compiled kernels may take, and what they do with sizes that no model has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localattn.core.geometry import WindowGeometry
from localattn.core.machine.processor import host_arch
from localattn.core.nodes.aft import AFT_VARIANT_BY_OP_TYPE
from localattn.core.nodes.attention import DOMAIN, VARIANT_BY_OP_TYPE, NodeAttributes
from localattn.core.nodes.fused import FUSED_BY_OP_TYPE, FUSED_DOMAIN, GATES, ROTATIONS
from localattn.core.nodes.grouped import GROUPED_BY_OP_TYPE, GroupedAttributes
from localattn.core.nodes.step import STEP_VARIANT_BY_OP_TYPE, StepAttributes
from localattn.plugins.compilers import find_compiler
from localattn.plugins.cpu.probes import probes
from localattn.plugins.shared_library import compile_library

from ..support.native.cpu_build import library
from ..support.native.cpu_program import INSTRUCTION_SETS, KERNEL_SOURCES
from ..support.native.fused_reference import output_shapes, shapes
from ..support.native_worker import THREADS

MIB = 1 << 20
# "A few": of a thread's scratch, and of what Python and onnxruntime take for a call.
A_THREAD, AROUND = 6 * MIB, 8 * MIB
WINDOW = WindowGeometry(64, 1, 0, causal=True, exact_windowsize=True)

Case = list[Any]
Shapes = dict[str, list[int]]


def attention(op_type: str, *sizes: int, dtype: str = "fp32", geometry: WindowGeometry = WINDOW) -> Case:
    """A node on `[B, N, H, D]`."""
    batch, length, heads, _ = sizes
    every: Shapes = {name: list(sizes) for name in ("query", "key", "value")} | {
        "key_mask": [batch, length],
        "attn_bias": [heads, geometry.window_size, geometry.keys_per_window],
    }
    inputs = {name: every[name] for name in VARIANT_BY_OP_TYPE[op_type].input_names}
    base = 32.0 if op_type.endswith("Xpos") else 0.0
    attributes = NodeAttributes(geometry, 1.0, xpos_scale_base=base).as_onnx()
    return [DOMAIN, op_type, dtype, inputs, {"output": list(sizes)}, attributes]


def grouped(op_type: str, *sizes: int, kv_heads: int = 1, dtype: str = "fp32") -> Case:
    """A node on `[B, N, H, D]` whose heads share heads of keys."""
    variant = GROUPED_BY_OP_TYPE[op_type]
    batch, length, heads, width = sizes
    keys = [batch, length, kv_heads, width]
    every: Shapes = {"query": list(sizes), "key": keys, "value": keys, "key_mask": [batch, length], "sinks": [heads]}
    inputs = {name: every[name] for name in variant.input_names}
    geometry = WindowGeometry.all_keys(causal=True) if variant.sees_all else WINDOW
    attributes = GroupedAttributes(geometry, 1.0, 30.0 if variant.has_softcap else 0.0).as_onnx()
    return [DOMAIN, op_type, dtype, inputs, {"output": list(sizes)}, attributes]


def aft(op_type: str, *sizes: int, reach: int = 8) -> Case:
    """A node on `[T, B, D]` whose biases reach so far."""
    variant = AFT_VARIANT_BY_OP_TYPE[op_type]
    length, batch, _ = sizes
    every: Shapes = {name: list(sizes) for name in ("gate", "key", "value")} | {
        "position_bias": [length, reach + 1 if variant.causal else 2 * reach + 1],
        "key_mask": [batch, length],
    }
    inputs = {name: every[name] for name in variant.input_names}
    return [DOMAIN, op_type, "fp32", inputs, {"output": list(sizes)}, {}]


def ring(op_type: str, slots: int, width: int, dtype: str = "fp32") -> Case:
    """A step or chunk node of one head of keys."""
    variant = STEP_VARIANT_BY_OP_TYPE[op_type]
    heads, rows = 2 if variant.grouped else 1, 3 if variant.chunked else 1
    keys, cache = slots + rows if variant.chunked else slots, [1, 1, slots, width]
    every: Shapes = {
        "query": [1, heads, rows, width],
        **{name: [1, 1, rows, width] for name in ("key", "value")},
        **dict.fromkeys(("key_cache", "value_cache"), cache),
        "score_bias": [rows, keys],
        "write_index": [slots] if variant.chunked else [1, 1, 1, 3],
        "query_scale": [rows, width],
        "key_scale": [keys, width],
        "sinks": [heads],
    }
    inputs = {name: every[name] for name in variant.input_names}
    outputs = {"output": every["query"], "next_key_cache": cache, "next_value_cache": cache}
    base, softcap = 32.0 * variant.has_xpos, 30.0 * variant.has_softcap
    attributes = StepAttributes(WINDOW, 1.0, xpos_scale_base=base, softcap=softcap).as_onnx(variant)
    return [DOMAIN, op_type, dtype, inputs, outputs, attributes]


def fused(op_type: str, *sizes: int, dtype: str = "fp32") -> Case:
    """A node on `batch, length, streams, dim, heads`."""
    inputs = shapes(op_type, *sizes)
    return [FUSED_DOMAIN, op_type, dtype, inputs, output_shapes(op_type, inputs), {}]


ORDINARY = [
    *(attention(op_type, 1, 512, 2, 64) for op_type in VARIANT_BY_OP_TYPE),
    *(grouped(op_type, 1, 512, 4, 64, kv_heads=2) for op_type in GROUPED_BY_OP_TYPE),
    *(aft(op_type, 512, 2, 64) for op_type in AFT_VARIANT_BY_OP_TYPE),
    *(ring(op_type, 129, 64) for op_type in STEP_VARIANT_BY_OP_TYPE),
    attention("WindowedAttention", 2, 1024, 4, 80, dtype="fp16"),
    attention("WindowedAttentionMask", 1, 2048, 1, 256, geometry=WindowGeometry(256, 1, 1)),
    *(fused(op_type, 1, 512, 4, 64, 2) for op_type in FUSED_BY_OP_TYPE),
]
HOSTILE = [
    attention("WindowedAttention", 1, 1, 1, 1 << 23),
    attention("WindowedAttention", 1, 1, 1, 1 << 23, dtype="fp16"),
    attention("WindowedAttentionMask", 1, 1, 4, 1 << 20),
    attention("WindowedAttentionBias", 1, 8, 1, 1 << 19),
    attention("WindowedAttention", 1, 64, 1, 1 << 14),
    attention("WindowedAttentionMaskBias", 1, 65, 1, 1 << 14, dtype="fp16"),
    attention("WindowedAttention", 1, 1 << 18, 1, 1),
    *(attention(op_type, 1, 64, 1, 1 << 13) for op_type in VARIANT_BY_OP_TYPE if op_type.endswith("Xpos")),
    *(grouped(op_type, 1, 64, 4, 1 << 13) for op_type in GROUPED_BY_OP_TYPE),
    *(aft(op_type, 8, 1, 1 << 20) for op_type in AFT_VARIANT_BY_OP_TYPE),
    aft("AFTLocal", 1 << 17, 1, 1),
    *(ring(op_type, 65, 1 << 13) for op_type in STEP_VARIANT_BY_OP_TYPE),
    *(ring(op_type, 1 << 17, 16, "fp16") for op_type in STEP_VARIANT_BY_OP_TYPE),
    fused("ReadStreams", 1, 2, 1024, 1, 1),
    fused("ReadStreams", 1, 2, 1, 1 << 20, 1),
    fused("MixStreams", 1, 2, 1024, 8, 1),
    fused("MixReadStreamsNorm", 1, 2, 1024, 8, 1),
    fused("ReadStreamsNorm", 1, 2, 1, 1 << 20, 1),
    fused("AddToStreams", 1, 2, 1 << 19, 1, 1),
    fused("BeginStreams", 1, 2, 1 << 19, 1, 1),
    fused("EndStreams", 1, 2, 1024, 8, 1),
    *(fused(op_type, 1, 1, 1, 1 << 20, 1) for op_type in ROTATIONS),
    *(fused(op_type, 1, 1, 1, 1 << 22, 1) for op_type in GATES),
]


def named(case: Case) -> str:
    first = "x".join(map(str, next(iter(case[3].values()))))
    return f"{case[1]}-{case[2]}-{first}"


def work(path: str | Path, cases: list[Case], **environment: str) -> list[dict[str, Any]]:
    """What the worker says of each case."""
    command = [sys.executable, "-m", "localattn.tests.support.native_worker", str(path), json.dumps(cases)]
    finished = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [json.loads(line) for line in finished.stdout.splitlines()]


def test_every_kernel_is_measured() -> None:
    every = {(probe.domain, probe.op_type) for probe in probes()}
    for cases in (ORDINARY, HOSTILE):
        assert {(case[0], case[1]) for case in cases} == every


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_memory_follows_from_the_tensors_and_is_given_back(instruction_set: str) -> None:
    """Measured in a process of its own: what a call takes beyond its inputs and outputs, and what stays after it."""
    cases = ORDINARY + HOSTILE
    found = work(library(), cases, LOCALATTN_CPU_ISA=instruction_set)
    for case, memory in zip(cases, found, strict=True):
        assert "error" not in memory, (named(case), memory)
        assert memory["peak"] <= 2 * memory["tensors"] + THREADS * A_THREAD + AROUND, (named(case), memory)
        assert memory["held"] <= THREADS * MIB + AROUND, (named(case), memory)


# Shapes of empty tensors: sizes beside a 0 may be anything.
EMPTY = [
    [
        FUSED_DOMAIN,
        "BeginStreams",
        "fp32",
        {"x": [0, 1, 64], "mix": [0, 1, 1 << 58, 1], "beta": [0, 1, 1 << 58, 1], "output": [0, 1, 64]},
        {"written": None},
        {},
    ],
    attention("WindowedAttention", 0, 1 << 30, 1 << 29, 1),
    attention("WindowedAttention", 1 << 30, 0, 1 << 29, 1),
    attention("WindowedAttentionMask", 1 << 30, 1 << 29, 0, 1),
    attention("WindowedAttention", 1, 1 << 30, 1 << 30, 0),
    [
        DOMAIN,
        "WindowedAttentionStep",
        "fp32",
        {
            **{name: [0, 1 << 29, 1, 64] for name in ("query", "key", "value")},
            **{name: [0, 1 << 29, 1 << 30, 64] for name in ("key_cache", "value_cache")},
            "score_bias": [1, 8],
            "write_index": [0, 1 << 29, 1, 3],
        },
        {"output": None, "next_key_cache": None, "next_value_cache": None},
        StepAttributes(WINDOW, 1.0).as_onnx(),
    ],
    fused("ReadStreams", 0, 1 << 40, 4, 16, 1),
    fused("MixStreams", 1 << 40, 0, 4, 16, 1),
    *(fused(op_type, 0, 1, 1, 16, 1 << 30) for op_type in ROTATIONS),
    [
        FUSED_DOMAIN,
        "GatedGelu",
        "fp32",
        {name: [1 << 30, 1 << 30, 0] for name in ("value", "gate")},
        {"gated": [1 << 30, 1 << 30, 0]},
        {},
    ],
]


@pytest.mark.slow
def test_no_undefined_behaviour_at_any_size(tmp_path: Path) -> None:
    """The whole library, nodes included, under the sanitizers in onnxruntime."""
    compiler = find_compiler(host_arch())
    # Python has neither: the sanitizer has to be there first, and what it watches beside it.
    preloaded = []
    for name in ("libasan.so", "libstdc++.so.6"):
        asked = subprocess.run([*compiler.command, f"-print-file-name={name}"], capture_output=True, text=True)
        preloaded.append(asked.stdout.strip())
        if not Path(preloaded[-1]).is_file():
            pytest.skip(f"this compiler has no {name}")
    options = ("-O1", "-g1", "-fno-sanitize-recover=all", "-fsanitize=address,undefined")
    made = tmp_path / "sanitized.so"
    compile_library(KERNEL_SOURCES, compiler, made, name=made.name, options=options, fix="")
    environment = {"LD_PRELOAD": " ".join(preloaded), "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}
    cases = [*EMPTY, *ORDINARY, *(case for case in HOSTILE if case[3] != HOSTILE[0][3])]
    found = work(made, cases, **environment)
    assert len(found) == len(cases)
    assert "at most" in found[0]["error"]
    assert [memory for memory in found[len(EMPTY) :] if "error" in memory] == []
