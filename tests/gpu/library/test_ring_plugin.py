"""Steps and chunks in the plugin library: launches repeated on a machine for PTX, arguments, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localattn.core.nodes.step import ring_slots
from localattn.plugins.kernel.ring import BY_SEQUENCE, SHARED, Plan, pack_ring_scalars, plan, ring_specs_for
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.kernel.tiles import tile_for
from localattn.plugins.library.sidecar import host_arch

from ...support.native.plugin_build import BUILT_FOR, HEAD_DIM
from ...support.native.plugin_drive import Driven, drive
from ...support.native.ring_node import OUTPUTS, Arrays, Case
from ..simulators.ptx.launch import launch
from ..simulators.ptx.memory import GlobalMemory
from ..simulators.ptx.program import read_program

pytest.importorskip("triton", reason="Triton compiles the kernels: pip install 'localattn[plugin]'")

# A ring that is overwritten many times and cut into splits; padding in each sequence; several tokens.
SPLIT = Case(1, 1_000_003, dtype="float16", dim=HEAD_DIM, heads=6, window=1100)
PADDED = Case(1, 300, dtype="float16", dim=HEAD_DIM, heads=4, batch=3, bias="padding")
CHUNK = Case(20, 1_000_003, dtype="float16", dim=HEAD_DIM, heads=4, kv_heads=2, sinks=True, window=70)
_TYPES = {"float16": "fp16", "float32": "fp32", "int64": "int64"}


def driven_by(tmp_path: Path, case: Case, arrays: Arrays, **changed: tuple[int, ...]) -> Driven:
    """What the library does with a node of these inputs, or of others in some shapes."""
    shapes = {name: array.shape for name, array in arrays.items()} | changed
    inputs = [f"{_TYPES[str(arrays[name].dtype)]}:{','.join(map(str, shape))}" for name, shape in shapes.items()]
    fields = [f"scale={case.attributes.scale!r}f"]
    shape = arrays["query"].shape
    given = {"shape": shape, "capability": 87, "drive_inputs": ";".join(inputs)}
    return drive(tmp_path, case.variant.op_type, fields, arch=host_arch(), **given)  # type: ignore[arg-type]


def cut_of(case: Case) -> tuple[Plan, dict[str, int]]:
    spec, _ = ring_specs_for(case.variant, "fp16", HEAD_DIM)
    sizes = {"tokens": case.rows, "slots": ring_slots(case.attributes.geometry), "kv_heads": case.kv_heads}
    group, tile = case.heads // case.kv_heads, tile_for(spec, TARGETS[BUILT_FOR[0]])
    return plan(tile, batch=case.batch, group=group, chunked=case.rows > 1, **sizes), sizes


@pytest.mark.parametrize("case", [SPLIT, PADDED, CHUNK], ids=["split", "padding", "chunk with sinks"])
def test_a_launch_repeated(case: Case, tmp_path: Path) -> None:
    arrays = case.inputs()
    driven = driven_by(tmp_path, case, arrays)
    assert all(driven.shown["supported"]) and driven.shown["configure"] == 0 and driven.shown["enqueue"] == [0, 0]
    (cut, sizes), biases = cut_of(case), BY_SEQUENCE if case.bias else SHARED
    calls = driven.launches[: 1 + (cut.splits > 1)]
    assert len(driven.launches) == 2 * len(calls) and (cut.splits > 1) == (case is SPLIT)
    assert calls[0]["scalars"] == list(pack_ring_scalars(case.attributes, cut, biases=biases, **sizes))
    assert calls[0]["grid"] == list(cut.grid)
    needed = 4 * cut.parts * (case.dim + 2)
    assert needed <= driven.shown["workspace"] and bool(driven.shown["workspace"]) == (cut.splits > 1)
    shapes = (arrays["query"].shape, arrays["key_cache"].shape, arrays["value_cache"].shape)
    found = [np.full(shape, np.nan, np.float16) for shape in shapes]
    parts = np.full(max(needed // 4, 1), np.nan, np.float32)
    memory = GlobalMemory()
    places = zip([*arrays.values(), *found], [*calls[0]["inputs"], *calls[0]["outputs"][1:]], strict=True)
    for array, address in places:
        memory.put(array, address)
    if needed:
        memory.put(parts, calls[0]["outputs"][0])
    for call in calls:
        outputs = call.get("outputs", [call["output"]])
        arguments = [*call["inputs"], *call["scalars"], *outputs]
        program = read_program(driven.ptx_of(call["entry"]))
        launch(program, memory, call["grid"], call["block"], call["shared"], arguments)
    for name, array, right in zip(OUTPUTS, found, case.expected(arrays), strict=True):
        exact = array.astype(np.float64)
        np.testing.assert_allclose(exact, right, rtol=0, atol=2e-3 if name == "output" else 0, err_msg=name)


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    arrays = PADDED.inputs()
    for name, shape, why in (
        ("query", (3, 4, 2, HEAD_DIM), "a step has one token"),
        ("query", (3, 5, 1, HEAD_DIM), "5 heads of queries cannot share 2 of keys"),
        ("key", (3, 2, 1, 32), "key is .* which does not fit query"),
        ("score_bias", (4, 1, 9), "score_bias is"),
        ("write_index", (9,), "write_index is"),
    ):
        driven = driven_by(tmp_path, PADDED, arrays, **{name: shape})
        assert driven.shown["configure"] == -1 and driven.shown["shape_change"] == -1, name
        assert re.search(f"GroupedWindowedAttentionStep: .*{why}", driven.messages), driven.messages


def test_an_empty_call_launches_nothing(tmp_path: Path) -> None:
    """Neither heads nor tokens: what positions are counted in must not be divided by."""
    arrays = CHUNK.inputs()
    none: dict[str, tuple[int, ...]] = dict.fromkeys(("key", "value"), (1, 2, 0, HEAD_DIM))
    none |= {"query": (1, 0, 0, HEAD_DIM), "score_bias": (0, arrays["key_cache"].shape[2]), "sinks": (0,)}
    driven = driven_by(tmp_path, CHUNK, arrays, **none)
    assert driven.shown["configure"] == 0 and driven.shown["shape_change"] == 0
    assert driven.shown["enqueue"] == [0, 0] and not driven.launches


def test_types_are_those_of_a_file_and_what_has_no_kernel_is_named(tmp_path: Path) -> None:
    arrays = SPLIT.inputs()
    arrays["key_cache"] = arrays["key_cache"].astype(np.float32)
    assert driven_by(tmp_path, SPLIT, arrays).shown["supported"].count(False) == 2, "the cache, and the next one"
    other = replace(SPLIT, dim=32)
    driven = driven_by(tmp_path, other, other.inputs())
    assert not driven.shown["supported"][0]
    assert "no kernel for fp16, step, head size 32 in this plugin library" in driven.messages
