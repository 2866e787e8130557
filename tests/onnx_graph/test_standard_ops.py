"""Files in standard operators alone: what is in them, that every number stays, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as h
import onnx_ir as ir
import onnxruntime
import pytest

from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import CheckFailed, UsageError
from localattn.exporter.jobs import convert as conversion
from localattn.exporter.jobs.convert import to_standard_ops
from localattn.exporter.options import FileOptions
from localattn.onnx_graph.standard_ops import rewrite, scan_states
from localattn.onnx_graph.summary import inspect_onnx
from localattn.runtime import open_step

from ..conftest import Finished
from ..runtimes.kinds import exported

DEFAULT = ("full", "AFT")
EXHAUSTIVE = ("fp16", "int8", "dynamic", "mask", "bias", "xpos", "step", "endless", "prefill", "module")
KINDS = [*DEFAULT, *(pytest.param(kind, marks=pytest.mark.slow) for kind in EXHAUSTIVE)]


def graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """The graph and those inside its nodes."""
    inner = [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return [graph, *(found for one in inner for found in graphs(one))]


def run(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The first output in onnxruntime."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_file_computes_the_same_in_standard_operators_alone(kind: str, tmp_path: Path) -> None:
    source, output = exported(kind), tmp_path / "plain.onnx"
    written, *_ = to_standard_ops(source, output)
    same = next(check for check in written.checks if check.name == "same as its source")
    assert same.figures["max_abs"] == 0.0
    model, before = onnx.load(output), onnx.load(source)
    assert not model.functions
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [
        (entry.domain, entry.version) for entry in before.opset_import if entry.domain == ""
    ]
    assert [x.name for x in (*model.graph.input, *model.graph.output)] == [
        x.name for x in (*before.graph.input, *before.graph.output)
    ]
    for graph in graphs(model.graph):
        assert {node.domain for node in graph.node} <= {""}
        assert not {"Constant", "LpNormalization"} & {node.op_type for node in graph.node}
        for attribute in (attribute for node in graph.node for attribute in node.attribute):
            assert attribute.type != onnx.AttributeProto.INTS or attribute.ints
    assert not model.graph.value_info


@pytest.mark.parametrize("kind", ["full", pytest.param("xpos", marks=pytest.mark.slow)])
def test_index_arithmetic_is_folded_and_nodes_have_the_names_of_modules(kind: str, tmp_path: Path) -> None:
    to_standard_ops(exported(kind), tmp_path / "plain.onnx")
    model = onnx.load(tmp_path / "plain.onnx")
    assert not {"Shape", "Range", "ConstantOfShape", "Expand"} & {node.op_type for node in model.graph.node}
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    inside = [name for name in names if name.startswith("layers.1.0.branch.attn_fn/")]
    assert "layers.1.0.branch.attn_fn/Softmax" in inside
    assert all(node.output[0] in (node.name, "logits") for node in model.graph.node if len(node.output) == 1)
    initial = {tensor.name for tensor in model.graph.initializer}
    assert "model.token_emb.weight" in initial
    assert "layers.0.0.branch/Reshape.shape" in initial
    assert not [name for name in initial if name.startswith("val_")]


def test_a_step_file_takes_its_prefill_file_along_and_shares_weights(tmp_path: Path) -> None:
    step, prefill = to_standard_ops(exported("step"), tmp_path / "plain.onnx")
    assert prefill.path.name == "plain.prefill.onnx"
    assert step.sidecar is not None and prefill.sidecar is not None and step.sidecar.step is not None
    assert step.sidecar.step.prefill == prefill.path.name
    assert step.sidecar.external_data == prefill.sidecar.external_data
    assert [path.name for path in tmp_path.glob("*.data")] == [step.sidecar.external_data]
    session = open_step(tmp_path / "plain.onnx")
    assert session.missing_prefill is None
    assert session.consume({"tokens": np.arange(19)[None] % 23}).shape == (1, 1, 23)


def test_the_sidecar_say_so_and_keep_what_the_export_has_proven(tmp_path: Path) -> None:
    source = exported("full")
    (written,) = to_standard_ops(source, tmp_path / "plain.onnx")
    sidecar, before = read_sidecar(tmp_path / "plain.onnx"), read_sidecar(source)
    assert sidecar is not None and before is not None and written.sidecar is not None
    assert sidecar.standard_ops and not before.standard_ops
    assert sidecar.windows == before.windows
    parity = next(check for check in sidecar.checks if check.name == "parity")
    assert parity.detail.endswith(f"of {source.name}")
    assert inspect_onnx(tmp_path / "plain.onnx").sidecar_matches


def test_an_export_is_written_so_and_judged_by_the_same_checks(
    tmp_path: Path, localattn: Callable[..., Finished]
) -> None:
    plain, checkpoint = tmp_path / "plain.onnx", exported("full").with_suffix(".pt")
    done = localattn("export", checkpoint, "--standard-ops", "-o", plain, "--format", "json")
    assert done.code == 0, done.err
    document, before = json.loads(done.out), read_sidecar(exported("full"))
    assert before is not None
    assert document["standard_ops"]
    assert [(check["name"], check["status"]) for check in document["checks"]] == [
        (check.name, check.status) for check in before.checks
    ]
    of_nodes = [check["detail"] for check in document["checks"] if check["name"] in ("window", "linear memory")]
    assert len(of_nodes) == 2
    assert all(detail.endswith("checked before the functions were inlined") for detail in of_nodes)
    assert not onnx.load(plain).functions
    refused = localattn("build", plain, "--backend", "tensorrt-rtx", "--plugin", "library", "-o", tmp_path / "x.engine")
    assert refused.code != 0
    assert "has no attention node" in refused.err


def test_a_vector_of_zeros_stays_one() -> None:
    x = h.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [3, 4])
    node = h.make_node("LpNormalization", ["x"], ["y"], axis=-1, p=2)
    y = h.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3, 4])
    model = h.make_model(h.make_graph([node], "g", [x], [y]), opset_imports=[h.make_opsetid("", 20)], ir_version=10)
    plain = ir.serde.serialize_model(rewrite.apply(ir.serde.deserialize_model(model)))
    assert "LpNormalization" not in {one.op_type for one in plain.graph.node}
    rows = np.array([[0, 0, 0, 0], [3, 0, 4, 0], [1e-20, 0, 0, 0]], dtype=np.float32)
    first, second = (
        onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": rows})[
            0
        ]
        for m in (model, plain)
    )
    np.testing.assert_array_equal(first, second)
    assert not second[0].any()


def test_values_that_a_scan_reads_from_outside_become_states() -> None:
    import onnx.parser

    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[3] start, float[4, 3] steps, float[3] x) => (float[3] last) {
        outer = Neg (x)
        last = Scan <num_scan_inputs = 1, body = b (state, step) => (next) {
            moved = Add (step, outer)
            next = Add (state, moved)
        }> (start, steps)
    }"""
    model = onnx.parser.parse_model(text)
    copy = scan_states.apply(model)
    (scan,) = [node for node in copy.graph.node if node.op_type == "Scan"]
    assert list(scan.input) == ["start", "outer", "steps"]
    assert len(scan.attribute[0].g.output or scan.attribute[1].g.output) == 2
    assert scan_states.apply(copy) is copy
    inputs = {"start": np.ones(3, "f"), "steps": np.arange(12, dtype="f").reshape(4, 3), "x": np.full(3, 2, "f")}
    np.testing.assert_array_equal(run(model, inputs), run(copy, inputs))


def test_a_file_whose_functions_are_missing_is_refused(tmp_path: Path) -> None:
    model = onnx.load(exported("full"))
    kept = [body for body in model.functions if body.domain != "localattn"]
    del model.functions[:]
    model.functions.extend(kept)
    onnx.save(model, tmp_path / "bare.onnx")
    with pytest.raises(UsageError, match="standard operators") as refused:
        to_standard_ops(tmp_path / "bare.onnx", tmp_path / "plain.onnx")
    assert "localattn::WindowedAttention" in refused.value.why
    assert not (tmp_path / "plain.onnx").exists()


def test_a_file_without_a_sidecar_is_converted_alone(tmp_path: Path) -> None:
    shutil.copy(exported("full"), tmp_path / "alone.onnx")
    (written,) = to_standard_ops(tmp_path / "alone.onnx", tmp_path / "plain.onnx")
    assert written.sidecar is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.onnx", "plain.onnx"]
    (tmp_path / "other.onnx.json").write_text("{}")
    with pytest.raises(UsageError, match="would not describe"):
        to_standard_ops(tmp_path / "alone.onnx", tmp_path / "other.onnx")


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("y = Loop <keepdims = 1> (x, x)", "attribute"),
        ("y = Slice (x, start, stop, axis, still)", "step"),
        ("f = Cast <to = 1> (x) y = Gather (x, f)", "indices"),
    ],
)
def test_a_file_that_onnx_refuses_is_at_fault_itself(fault: str, named: str, tmp_path: Path) -> None:
    import onnx.parser

    text = f"""<ir_version: 10, opset_import: ["": 20]> g (float[4] x) => (float[n] y)
        <int64[1] start = {{0}}, int64[1] stop = {{4}}, int64[1] axis = {{0}}, int64[1] still = {{0}}> {{ {fault} }}"""
    (tmp_path / "given.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    with pytest.raises(UsageError, match=r"given.onnx cannot be converted.") as refused:
        to_standard_ops(tmp_path / "given.onnx", tmp_path / "plain.onnx")
    assert refused.value.why.startswith("ONNX's checker refuses it: ")
    assert named in refused.value.why
    assert [path.name for path in tmp_path.iterdir()] == ["given.onnx"]


def test_a_file_that_onnxruntime_refuses_is_at_fault_itself(tmp_path: Path) -> None:
    import onnx.parser

    # Of `z` the checker does not know the length.
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[4] x) => (float[n] y) <int64[1] three = {3}> {
        t = Identity (three)
        z = ConstantOfShape (t)
        y = Add (x, z)
    }"""
    (tmp_path / "given.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    with pytest.raises(UsageError, match=r"given\.onnx cannot be loaded"):
        to_standard_ops(tmp_path / "given.onnx", tmp_path / "plain.onnx")


def test_what_computes_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: ir.Model) -> ir.Model:
        changed = rewrite.apply(model)
        scale = next(v for v in changed.graph.initializers.values() if v.name.endswith("norm.weight"))
        scale.const_value = ir.tensor(scale.const_value.numpy() * 1.5)
        return changed

    monkeypatch.setattr(conversion, "rewrite", type("wrong", (), {"apply": staticmethod(wrong)}))
    with pytest.raises(CheckFailed, match="same as its source"):
        to_standard_ops(exported("full"), tmp_path / "plain.onnx")
    assert not list(tmp_path.iterdir())


def test_contradicting_options_are_refused(tmp_path: Path, localattn: Callable[..., Finished]) -> None:
    with pytest.raises(UsageError, match="contradict"):
        FileOptions(standard_ops=True, function_body=False)
    checkpoint = exported("full").with_suffix(".pt")
    done = localattn("export", checkpoint, "--standard-ops", "--no-function-body", "-o", tmp_path / "x.onnx")
    assert done.code == 2
    assert "--no-function-body" in done.err
    done = localattn("convert", exported("full"), "-o", tmp_path / "x.onnx")
    assert done.code == 2
    assert "--standard-ops" in done.err


def test_quantize_dynamic_takes_a_step_file_in_standard_operators(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    to_standard_ops(exported("endless"), tmp_path / "plain.onnx")
    quantize_dynamic(tmp_path / "plain.onnx", tmp_path / "small.onnx")
    assert "MatMulInteger" in {node.op_type for node in onnx.load(tmp_path / "small.onnx").graph.node}
