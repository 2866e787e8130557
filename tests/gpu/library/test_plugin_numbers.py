"""The plugin's numbers without a GPU: the PTX inside the library, launched as the library launched it.

TensorRT's interface is driven by a C++ program, the CUDA driver's by a stand-in that keeps what it is given; the launch
is then repeated by a machine for PTX, on tensors at the very addresses, and judged by the float64 reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localattn.core.nodes.gpu import KernelAttributes
from localattn.core.nodes.grouped import GroupedAttributes
from localattn.plugins.kernel import aft
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.kernel.tiles import tile_for
from localattn.plugins.library.sidecar import ARCHITECTURES, Arch, host_arch

from ...support import reference
from ...support.models import aft_node
from ...support.native.plugin_build import BUILT_FOR, HEAD_DIM
from ...support.native.plugin_drive import (
    AFT_OP_TYPES,
    BATCH,
    CASES,
    GROUP,
    GROUPED,
    HEADS,
    LENGTH,
    OP_TYPES,
    attributes_for,
    drive,
    fields_of,
    spec_of,
)
from ..simulators.ptx.launch import launch
from ..simulators.ptx.memory import GlobalMemory
from ..simulators.ptx.program import read_program

Array = np.ndarray[Any, Any]


def inputs_of(attributes: KernelAttributes, op_type: str) -> list[Array | None]:
    """Query, key, value, mask, bias and sinks, in the plugin's types."""
    rng = np.random.default_rng(3)
    shared = HEADS // GROUP if op_type in GROUPED else HEADS
    sizes = ((BATCH, heads, LENGTH, HEAD_DIM) for heads in (HEADS, shared, shared))
    shapes = [tuple(size[axis] for axis in attributes.perm) for size in sizes]
    g = attributes.geometry
    bias = rng.standard_normal((HEADS, g.window_size, g.keys_per_window)).astype(np.float16) if "Bias" in op_type else 0
    return [
        *(rng.standard_normal(shape).astype(np.float16) for shape in shapes),
        rng.random((BATCH, LENGTH)) < 0.7 if "Mask" in op_type else None,
        bias if "Bias" in op_type else None,
        rng.standard_normal(HEADS).astype(np.float16) if "Sinks" in op_type else None,
    ]


def check(case: str, op_type: str, arch: Arch, tmp_path: Path) -> None:
    attributes = attributes_for(op_type, CASES[case])
    inputs = inputs_of(attributes, op_type)
    query = inputs[0]
    assert query is not None
    driven = drive(
        tmp_path,
        op_type,
        fields_of(attributes),
        arch=arch,
        shape=query.shape,
        capability=87,
        drive_kv_heads=str(HEADS // GROUP if op_type in GROUPED else HEADS),
    )
    call = driven.launches[0]
    assert call["ptx"]
    memory, output = GlobalMemory(), np.full_like(query, np.nan)
    given = [x for x in inputs if x is not None]
    for array, address in zip([*given, output], [*call["inputs"], call["output"]], strict=True):
        memory.put(array, address)
    arguments = [*call["inputs"], *call["scalars"], call["output"]]
    launch(read_program(driven.ptx), memory, call["grid"], call["block"], call["shared"], arguments)
    exact = [None if x is None else x.astype(np.float64) if x.dtype == np.float16 else x for x in inputs]
    if isinstance(attributes, GroupedAttributes):
        a, (q, k, v, mask, _, sinks) = attributes, exact
        expected = reference.grouped_attention(a.geometry, a.scale, a.softcap, a.perm, q, k, v, mask, sinks)  # type: ignore[arg-type]
    else:
        expected = reference.windowed_attention(attributes, *exact[:5])  # type: ignore[arg-type]
        if attributes.xpos_scale_base:
            # The kernel rounds both factors of a score to TF32: up to 1.4e-2 in these cases, where scores reach 56.
            np.testing.assert_allclose(output.astype(np.float64), expected, rtol=0, atol=2e-2)
            block = tile_for(spec_of(op_type, attributes), TARGETS[BUILT_FOR[0]]).block_queries
            expected = reference.windowed_attention(attributes, *exact[:5], tf32_block=block)  # type: ignore[arg-type]
    np.testing.assert_allclose(output.astype(np.float64), expected, rtol=0, atol=3e-3)


@pytest.mark.parametrize(
    ("op_type", "case"),
    [(name, case) for name in OP_TYPES[:4] for case in CASES]
    + [(name, list(CASES)[index % len(CASES)]) for index, name in enumerate(OP_TYPES[4:])],
)
def test_a_launch_repeated(case: str, op_type: str, tmp_path: Path) -> None:
    check(case, op_type, host_arch(), tmp_path)


@pytest.mark.parametrize("op_type", AFT_OP_TYPES)
def test_a_launch_of_aft_local_repeated(op_type: str, tmp_path: Path) -> None:
    case = aft_node.Case(75, 6, "Causal" in op_type, "Mask" in op_type, batch=2, dim=37)
    arrays = case.inputs(change="spike")
    shape, bias = (75, 2, 37), f"75,{case.columns}"
    driven = drive(tmp_path, op_type, [], dtype="fp32", shape=shape, capability=87, drive_bias=bias)
    assert all(driven.shown["supported"]) and driven.shown["configure"] == 0 and driven.shown["fields"] == {}
    assert driven.shown["enqueue"] == [0, 0] and len(driven.loads) == 1
    call, output = driven.launches[0], np.full_like(arrays["gate"], np.nan)
    assert call["scalars"] == [75, 2, 37, 6] and call["grid"] == [*aft.grid(aft.TILE, *shape)]
    memory = GlobalMemory()
    for array, address in zip([*arrays.values(), output], [*call["inputs"], call["output"]], strict=True):
        memory.put(array, address)
    arguments = [*call["inputs"], *call["scalars"], call["output"]]
    launch(read_program(driven.ptx), memory, call["grid"], call["block"], call["shared"], arguments)
    expected = aft_node.expected(case, arrays)
    np.testing.assert_allclose(output, expected, atol=aft_node.finest(arrays), rtol=1e-5)


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != host_arch()])
@pytest.mark.parametrize("op_type", [OP_TYPES[0], OP_TYPES[-1]])
def test_a_launch_by_the_library_of_the_other_processor(op_type: str, arch: Arch, tmp_path: Path) -> None:
    check("causal exact", op_type, arch, tmp_path)
