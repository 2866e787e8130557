"""The profile of `localattn bench`: which module each node came from, and what a trace's events add up to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from localattn.core.errors import CheckFailed
from localattn.runtime.bench.attribution import UNKNOWN, Origin, module_of, pattern
from localattn.runtime.bench.profile import profile_candidate, summarise
from localattn.runtime.bench.request import Candidate
from localattn.runtime.inputs.arrays import save_arrays

# A function is inlined, products are fused with their transposes, and the slices become one Split.
MODEL = """
<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
g (float[8, 32, 32] x) => (float[8, 32, 32] y) {
    turned = Transpose <perm = [0, 2, 1]> (x)
    product = MatMul(turned, x)
    normed = own.Norm(product)
    y = Relu(normed)
}
<domain: "own", opset_import: ["" : 20]>
Norm (a) => (b) {
    axes = Constant <value_ints = [-1]> ()
    mean = ReduceMean(a, axes)
    moved = Sub(a, mean)
    square = Mul(moved, moved)
    spread = ReduceMean(square, axes)
    root = Sqrt(spread)
    one = Constant <value_float = 1.0> ()
    safe = Add(root, one)
    b = Div(moved, safe)
}
"""

LOOP = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[64, 64] x) => (float[64, 64] y) <int64 trips = {20}, bool go = {1}> {
    y = Loop (trips, go, x) <body = body (int64 i, bool more, float[64, 64] state) => (bool again, float[64, 64] next) {
        again = Identity(more)
        product = MatMul(state, state)
        next = Tanh(product)
    }>
}
"""


def write(path: Path, text: str, modules: dict[str, str]) -> Path:
    """The model, its nodes named and told their modules by what they put out."""
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
        if node.output[0] in modules:
            node.metadata_props.add(key="module", value=modules[node.output[0]])
    for function in model.functions:
        for index, node in enumerate(function.node):
            node.name = f"{node.op_type}_{index}"
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def profiled(model: Path, **inputs: np.ndarray):
    save_arrays(model.with_suffix(".npz"), inputs)
    return profile_candidate(Candidate(model, "cpu", 1, None), model.name, model.with_suffix(".npz"), top=20)


def test_inlined_fused_and_added_nodes_find_their_module(tmp_path):
    modules = {"turned": "layers.0.mix", "product": "layers.0.mix", "normed": "layers.0.norm", "y": "act"}
    found = profiled(write(tmp_path / "m.onnx", MODEL, modules), x=np.ones((8, 32, 32), np.float32))
    assert found.runs >= 10 and found.named == pytest.approx(1)
    assert {share.name for share in found.modules} == {"layers.0.mix", "layers.0.norm", "act"}
    assert {share.name for share in found.patterns} == {"layers.*.mix", "layers.*.norm", "act"}
    by_module = {share.name: share.nodes for share in found.modules}
    assert by_module["layers.0.norm"] >= 3 and by_module["act"] == 1
    assert {node.module for node in found.nodes if node.operator in ("ReduceMean", "Sqrt")} == {"layers.0.norm"}


def test_what_has_no_module_is_said_to_have_none(tmp_path):
    found = profiled(write(tmp_path / "m.onnx", MODEL, {"y": "act"}), x=np.ones((8, 32, 32), np.float32))
    # What feeds the named node is used there; a guess that the docs tell of.
    assert found.named == pytest.approx(1)
    found = profiled(write(tmp_path / "n.onnx", MODEL, {}), x=np.ones((8, 32, 32), np.float32))
    assert found.named == 0 and [share.name for share in found.modules] == [UNKNOWN]


def test_the_body_of_a_loop_counts_once(tmp_path):
    found = profiled(write(tmp_path / "m.onnx", LOOP, {"y": "scan"}), x=np.zeros((64, 64), np.float32))
    assert [(share.name, share.nodes) for share in found.operators] == [("Loop", 1)]
    assert found.modules[0].name == "scan"
    assert 0 < found.node_ms <= found.run_ms


def event(name: str, begin: int, duration: int, category: str = "Node", operator: str = "Add") -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, "args": {"op_name": operator}}


def test_runs_that_warmed_up_do_not_count_and_the_rest_is_one_row():
    events = []
    for run, factor in enumerate((50, 1, 1)):
        begin = 100_000 * run
        events.append(event("model_run", begin, 1000 * factor, "Session"))
        for index in range(5):
            events.append(event(f"n{index}_kernel_time", begin + 10 + 100 * factor * index, (5 - index) * factor))
    known = {f"n{index}": Origin("Add", f"layers.{index}") for index in range(4)}
    found = summarise("m", events, 2, known, top=2)
    assert (found.run_ms, found.node_ms) == (1.0, 0.015)
    assert [(s.name, pytest.approx(s.ms), s.nodes) for s in found.modules] == [
        ("layers.0", 0.005, 1), ("layers.1", 0.004, 1), ("3 others", 0.006, 3)
    ]  # fmt: skip
    assert found.named == pytest.approx(14 / 15)
    with pytest.raises(CheckFailed):
        summarise("m", events, 4, known, top=2)


@pytest.mark.parametrize(
    ("name", "metadata", "module"),
    [
        ("node", {"module": "layers.0"}, "layers.0"),
        ("node", {"pkg.torch.onnx.name_scopes": "['', 'layers.0', 'layers.0.norm', 'mul_1']"}, "layers.0.norm"),
        ("node", {"pkg.torch.onnx.name_scopes": "['', 'mul_1']"}, ""),
        ("node", {"pkg.torch.onnx.name_scopes": "__import__('os')"}, ""),
        ("/layers.0/norm/Mul", {}, "layers.0.norm"),
        ("node_mul_1", {}, ""),
    ],
)
def test_modules_as_other_exporters_write_them(name, metadata, module):
    assert module_of(name, metadata) == module


def test_a_pattern_hides_the_layer_only():
    assert pattern("encoder.layers.12.mlp.0") == "encoder.layers.*.mlp.0"
    assert pattern("conv1d.x2") == "conv1d.x2"
