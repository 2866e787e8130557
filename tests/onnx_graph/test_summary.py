"""What is read from real ONNX files: nodes, windows, weights, sidecar."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from localattn.core.documents.sidecar import Sidecar, sidecar_path
from localattn.core.errors import UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import DOMAIN, PLUGIN_ATTRIBUTES, VARIANTS, NodeAttributes
from localattn.core.nodes.check import check_attributes
from localattn.core.nodes.fused import FUSED_DOMAIN, FUSED_NODES
from localattn.core.nodes.step import STEP_VARIANTS, StepAttributes
from localattn.core.storage.files import sha256
from localattn.core.tensors import TensorSpec
from localattn.onnx_graph.summary import FunctionSummary, inspect_onnx

from ..conftest import Finished
from ..support.native.cpu_build import library

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


def test_the_sidecar_of_a_model(model_path):
    summary = inspect_onnx(model_path)
    assert summary.inputs == [TensorSpec("x", "float32", (1, "N", 4)), TensorSpec("c", "bool", ())]
    assert summary.outputs == [TensorSpec("y", "float32", (1, "N", 4))]
    assert summary.opsets == {"ai.onnx": 20, "localattn": 1}
    assert (summary.ir_version, summary.producer) == (10, "pytorch 2.13")
    assert summary.nodes == {"Mul": 2, "localattn::WindowedAttention": 1, "If": 1, "Relu": 1}
    assert summary.functions == [FunctionSummary("localattn", "WindowedAttention", 2)]
    assert summary.weight_bytes == {"float32": 16, "float16": 12, "int64": 8}
    assert summary.initializer_bytes == 36 and summary.weight_dtype == "float32"
    assert summary.file_bytes == model_path.stat().st_size
    (node,) = summary.windowed
    assert (node.name, node.op_type) == ("layers.0", "WindowedAttention")
    assert node.attributes == ATTRIBUTES
    assert summary.sidecar is None and summary.sidecar_matches is None


def test_numbers_narrower_than_a_byte_share_it(tmp_path):
    kinds = {"float4_e2m1fn": "FLOAT4E2M1", "int2": "INT2", "int4": "INT4", "uint2": "UINT2", "uint4": "UINT4"}
    known = {name: getattr(onnx.TensorProto, kind) for name, kind in kinds.items() if hasattr(onnx.TensorProto, kind)}
    expected = {"float4_e2m1fn": 5, "int2": 3, "int4": 5, "uint2": 3, "uint4": 5}
    weights = [
        onnx.TensorProto(name=name, data_type=kind, dims=[3, 3], raw_data=bytes(expected[name]))
        for name, kind in known.items()
    ]
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], weights)), path)
    assert inspect_onnx(path).weight_bytes == {name: expected[name] for name in known}


def test_external_weights_count_and_missing_ones_are_named(tmp_path):
    weight = onnx.numpy_helper.from_array(np.ones((64, 4), np.float32), "w")
    value = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [64, 4])
    node = onnx.helper.make_node("Identity", ["w"], ["y"])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [value], [weight]))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.bin", size_threshold=0)
    summary = inspect_onnx(path)
    assert summary.weight_bytes == {"float32": 1024} and summary.file_bytes < 1024
    assert summary.external_data == ["model.bin"] and summary.missing_external_data == []
    (tmp_path / "model.bin").unlink()
    assert inspect_onnx(path).missing_external_data == ["model.bin"]


def test_the_sidecar_is_checked_against_the_file(model_path):
    summary = {
        "class": "local_attention.LocalAttention", "kwargs": {}, "inputs": [], "outputs": [], "seq_len": 8,
        "batch": 1, "dtype": "fp32", "opset": 20, "function_body": True, "checkpoint_sha256": "",
        "checkpoint_name": "", "model_sha256": sha256(model_path), "created": "",
    }  # fmt: skip
    sidecar_path(model_path).write_text(Sidecar.model_validate(summary).to_json())
    assert inspect_onnx(model_path).sidecar_matches is True
    with model_path.open("ab") as stream:
        stream.write(b"\x92\x01\x00")  # protobuf: an unknown field, empty
    changed = inspect_onnx(model_path)
    assert changed.sidecar_matches is False
    assert changed.to_dict()["sidecar"]["class"] == "local_attention.LocalAttention"


def test_the_sidecar_are_json(model_path):
    summary = json.loads(json.dumps(inspect_onnx(model_path).to_dict(), allow_nan=False))
    assert summary["windowed"][0]["attributes"]["window_size"] == 8
    assert summary["inputs"][0] == {"name": "x", "dtype": "float32", "shape": [1, "N", 4]}
    assert summary["weight_dtype"] == "float32" and summary["sidecar"] is None


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


# What each attribute may not be, besides missing: of another type, and out of its range.
WRONG_TYPES: dict[str, list[Any]] = {
    "int": ["8", 8.0, [8], onnx.helper.make_tensor("t", onnx.TensorProto.FLOAT, [1], [8.0])],
    "float": ["0.125", 1, [0.125], onnx.helper.make_graph([], "g", [], [])],
    "list": ["0213", 0, 0.5, [0.0, 2.0, 1.0, 3.0]],
    "str": [1, 0.5, [1], onnx.helper.make_tensor("t", onnx.TensorProto.FLOAT, [1], [8.0])],
}
OUT_OF_RANGE: dict[str, list[Any]] = {
    "window_size": [0, -1, 2**31 + 1, 2**63 - 1, -(2**63)],
    "look_backward": [-1, 2**63 - 1, 2**31],
    "look_forward": [-1, 2**63 - 1, 1],  # the window is causal
    "causal": [2, -1],
    "exact_windowsize": [2, -(2**63)],
    "scale": [math.nan, math.inf, -math.inf],
    "shared_qk": [2, -1],
    "perm": [[0, 1, 2], [3, 2, 1, 0], [0, 2, 1, 2**62]],
    "query_block": [0, -5, 2**62],
    "xpos_scale_base": [math.nan, math.inf],
    "softcap": [0.0, -1.0, math.nan, math.inf],
    "plugin_namespace": [],
    "plugin_version": [],
}
STEP = StepAttributes(WindowGeometry(8, causal=True), 0.125, softcap=5.0)
XPOS = {"xpos_scale_base": 4.0}
CONTRACTS = {
    **{v.op_type: (DOMAIN, ATTRIBUTES | XPOS if v.has_xpos else ATTRIBUTES) for v in VARIANTS},
    **{v.op_type: (DOMAIN, STEP.as_onnx(v) | (XPOS if v.has_xpos else {})) for v in STEP_VARIANTS},
    **{node.op_type: (FUSED_DOMAIN, dict[str, Any]()) for node in FUSED_NODES},
}
ABSENT = object()


def wrong_attributes() -> Iterator[tuple[str, str, Any]]:
    """Op type, attribute and a value that it must not have, `ABSENT` for none."""
    for op_type, (_, attributes) in CONTRACTS.items():
        for name, value in attributes.items():
            wrong = [ABSENT, *WRONG_TYPES[type(value).__name__], *OUT_OF_RANGE[name]]
            if name == "xpos_scale_base" and op_type.endswith("Xpos"):
                wrong.append(0.0)
            yield from ((op_type, name, each) for each in wrong)
        if not attributes:
            yield from ((op_type, "window_size", each) for each in (8, "8", [8.0]))


def write_node(path: Path, op_type: str, changed: dict[str, Any], *, head_dim: int = 4) -> None:
    """A model of one node, without a body, some of whose attributes are changed."""
    domain, attributes = CONTRACTS[op_type]
    attributes = {name: value for name, value in (attributes | changed).items() if value is not ABSENT}
    tensors = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 16, 2, head_dim]) for name in ("x", "y")
    ]
    node = onnx.helper.make_node(op_type, ["x", "x", "x"], ["y"], "layers.0", domain=domain, **attributes)
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid(domain, 1)]
    graph = onnx.helper.make_graph([node], "g", tensors[:1], tensors[1:])
    path.write_bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def test_attributes_of_every_node_are_what_its_contract_says(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    for op_type in CONTRACTS:
        write_node(path, op_type, {})
        assert inspect_onnx(path).nodes == {f"{CONTRACTS[op_type][0]}::{op_type}": 1}
    tried = list(wrong_attributes())
    assert len(tried) > 500
    for op_type, name, value in tried:
        write_node(path, op_type, {name: value})
        with pytest.raises(UsageError) as refused:
            inspect_onnx(path)
        error = refused.value
        assert "'layers.0'" in error.what and op_type in error.what, (op_type, name, value)
        assert name in error.why, (op_type, name, value, error.why)
        assert len(error.why) < 300 and error.fix


def test_wrong_attributes_end_commands_with_one_error(
    localattn: Callable[..., Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` too, which has a kernel that refuses the node, or none; and no body to fall back to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.onnx"
    calls = (("inspect",), ("run",), ("run", "--plugin", "none"), ("run", "--plugin-library", library()))
    for op_type, name, value in (
        ("WindowedAttention", "window_size", "eight"),
        ("WindowedAttentionXpos", "perm", [0.0]),
        ("WindowedAttentionStep", "scale", ABSENT),
        ("GatedGelu", "window_size", 8),
    ):
        write_node(path, op_type, {name: value})
        for command, *options in calls:
            finished = localattn(command, path, *options)
            assert finished.code == 2, (op_type, command, options, finished)
            assert "'layers.0'" in finished.err and name in finished.err
            assert finished.err.count("Error:") == 1 and "Build one" not in finished.err


@pytest.mark.parametrize("head_dim", [0, 1, 3])
def test_xpos_takes_pairs_of_channels(tmp_path: Path, head_dim: int) -> None:
    for op_type in CONTRACTS:
        write_node(tmp_path / "model.onnx", op_type, {}, head_dim=head_dim)
        if op_type.endswith("Xpos"):
            with pytest.raises(UsageError, match="xpos scales channels in pairs"):
                inspect_onnx(tmp_path / "model.onnx")
        else:
            inspect_onnx(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "domain, op_type, plugin", [(FUSED_DOMAIN, "GatedGelu", {}), (DOMAIN, "AFTLocalMask", PLUGIN_ATTRIBUTES)]
)
def test_nodes_without_options_have_no_attribute_of_any_type(domain, op_type, plugin):
    """None is what is read of a tensor or a graph."""
    check_attributes(domain, op_type, plugin)
    for wrong in ({"x": None}, {"x": 1}, {"plugin_version": None}):
        with pytest.raises(UsageError, match="has no attribute"):
            check_attributes(domain, op_type, plugin | wrong)
