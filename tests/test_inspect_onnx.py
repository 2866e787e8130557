"""Facts read from real ONNX files: nodes, windows, weights, sidecar."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.parser
import pytest

from localattn.core.errors import UsageError
from localattn.core.files import sha256
from localattn.core.geometry import WindowGeometry
from localattn.core.node import NodeAttributes
from localattn.core.sidecar import Sidecar, sidecar_path
from localattn.core.tensors import TensorSpec
from localattn.onnx_graph.facts import FunctionFacts, inspect_onnx

MODEL = """
<ir_version: 10, producer_name: "pytorch", producer_version: "2.13",
 opset_import: ["" : 20, "localattn" : 1]>
g (float[1, N, 4] x, bool c, float16[2, 3] half) => (float[1, N, 4] y)
<float[4] w = {1.0, 2.0, 3.0, 4.0}, float16[2, 3] half = {1, 1, 1, 1, 1, 1}, int64[1] one = {1}>
{
    h = Mul(x, w)
    a = localattn.WindowedAttention(h)
    y = If (c) <
        then_branch = t () => (t_out) { t_out = Mul(a, w) },
        else_branch = e () => (e_out) { e_out = Relu(a) }
    >
}
<domain: "localattn", opset_import: ["" : 20]>
WindowedAttention (q) => (out) { s = Relu(q) out = Relu(s) }
"""
ATTRIBUTES = NodeAttributes(WindowGeometry(8, causal=True), scale=0.125).as_onnx()


@pytest.fixture
def model_path(tmp_path):
    model = onnx.parser.parse_model(MODEL)
    node = next(node for node in model.graph.node if node.domain == "localattn")
    node.name = "layers.0"
    node.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in ATTRIBUTES.items())
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    return path


def test_the_facts_of_a_model(model_path):
    facts = inspect_onnx(model_path)
    assert facts.inputs == [TensorSpec("x", "float32", (1, "N", 4)), TensorSpec("c", "bool", ())]
    assert facts.outputs == [TensorSpec("y", "float32", (1, "N", 4))]
    assert facts.opsets == {"ai.onnx": 20, "localattn": 1}
    assert (facts.ir_version, facts.producer) == (10, "pytorch 2.13")
    assert facts.nodes == {"Mul": 2, "localattn::WindowedAttention": 1, "If": 1, "Relu": 1}
    assert facts.functions == [FunctionFacts("localattn", "WindowedAttention", 2)]
    assert facts.weight_bytes == {"float32": 16, "float16": 12, "int64": 8}
    assert facts.initializer_bytes == 36 and facts.weight_dtype == "float32"
    assert facts.file_bytes == model_path.stat().st_size
    (node,) = facts.windowed
    assert (node.name, node.op_type) == ("layers.0", "WindowedAttention")
    assert node.attributes == ATTRIBUTES
    assert facts.sidecar is None and facts.sidecar_matches is None


def test_external_weights_count_and_missing_ones_are_named(tmp_path):
    weight = onnx.numpy_helper.from_array(np.ones((64, 4), np.float32), "w")
    value = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [64, 4])
    node = onnx.helper.make_node("Identity", ["w"], ["y"])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [value], [weight]))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.bin", size_threshold=0)
    facts = inspect_onnx(path)
    assert facts.weight_bytes == {"float32": 1024} and facts.file_bytes < 1024
    assert facts.external_data == ["model.bin"] and facts.missing_external_data == []
    (tmp_path / "model.bin").unlink()
    assert inspect_onnx(path).missing_external_data == ["model.bin"]


def test_the_sidecar_is_checked_against_the_file(model_path):
    facts = {
        "class": "local_attention.LocalAttention", "kwargs": {}, "inputs": [], "outputs": [], "seq_len": 8,
        "batch": 1, "dtype": "fp32", "opset": 20, "function_body": True, "checkpoint_sha256": "",
        "checkpoint_name": "", "model_sha256": sha256(model_path), "created": "",
    }  # fmt: skip
    sidecar_path(model_path).write_text(Sidecar.model_validate(facts).to_json())
    assert inspect_onnx(model_path).sidecar_matches is True
    with model_path.open("ab") as stream:
        stream.write(b"\x92\x01\x00")  # protobuf: an unknown field, empty
    changed = inspect_onnx(model_path)
    assert changed.sidecar_matches is False
    assert changed.to_dict()["sidecar"]["class"] == "local_attention.LocalAttention"


def test_the_facts_are_json(model_path):
    facts = json.loads(json.dumps(inspect_onnx(model_path).to_dict(), allow_nan=False))
    assert facts["windowed"][0]["attributes"]["window_size"] == 8
    assert facts["inputs"][0] == {"name": "x", "dtype": "float32", "shape": [1, "N", 4]}
    assert facts["weight_dtype"] == "float32" and facts["sidecar"] is None


@pytest.mark.parametrize("cut", [0, 1, 7, 100, -1])
def test_a_cut_file_is_refused(model_path, cut):
    model_path.write_bytes(model_path.read_bytes()[:cut])
    with pytest.raises(UsageError, match=r"model\.onnx is not an ONNX model"):
        inspect_onnx(model_path)


@pytest.mark.parametrize("content", [b"text, not a model\n", bytes(300), b"\xff" * 64, b'{"graph": {}}'])
def test_other_files_are_refused(tmp_path, content):
    for name in ("model.onnx", "model.json", "model.txt"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match="not an ONNX model"):
            inspect_onnx(tmp_path / name)


def test_paths_that_are_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.onnx"):
        with pytest.raises(UsageError, match="Cannot read"):
            inspect_onnx(path)
