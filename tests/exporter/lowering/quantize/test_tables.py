"""Tables of embeddings in 8 bits: exact look-ups of the rounded rows, and one table for embeddings and head."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from localattn.exporter.lowering.quantize import blocked, tables
from localattn.exporter.lowering.quantize.blocks import round_for_head, round_in_blocks
from localattn.onnx_graph.block_weights import in_standard_operators
from localattn.onnx_graph.onnx_file import OnnxFile
from localattn.runtime.inputs.vocabulary import rows_of_table

TOKENS = np.array([[3, 95, 0], [41, 7, 95]])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take small tables as large ones."""
    monkeypatch.setattr(tables, "LEAST", 96 * 64)


def model(head: str, width: int = 128, extra: bool = False) -> tuple[onnx.ModelProto, np.ndarray]:
    """A look-up, a linear layer, and a head: "turned" or "gemm" read the table, "own" a matrix of its own."""
    rng, helper, kind = np.random.default_rng(0), onnx.helper, onnx.TensorProto.FLOAT
    arrays = {"table": rng.standard_normal((96, width)), "w": rng.standard_normal((width, width)) / width**0.5}
    nodes = [helper.make_node("Gather", ["table", "tokens"], ["x"]), helper.make_node("MatMul", ["x", "w"], ["h"])]
    if head == "turned":
        nodes += [helper.make_node("Transpose", ["table"], ["t"], perm=[1, 0])]
        nodes += [helper.make_node("MatMul", ["h", "t"], ["logits"])]
    elif head == "gemm":
        arrays["flat"] = np.array([-1, width])
        nodes += [helper.make_node("Reshape", ["h", "flat"], ["f"])]
        nodes += [helper.make_node("Gemm", ["f", "table"], ["logits"], transB=1)]
    else:
        arrays["own"] = rng.standard_normal((width, 96))
        nodes += [helper.make_node("MatMul", ["h", "own"], ["logits"])]
    outputs = [helper.make_tensor_value_info("logits", kind, ["n", 96] if head == "gemm" else [2, 3, 96])]
    if extra:
        nodes += [helper.make_node("ReduceSum", ["table"], ["sum"], keepdims=0)]
        outputs += [helper.make_tensor_value_info("sum", kind, [])]
    inputs = [helper.make_tensor_value_info("tokens", onnx.TensorProto.INT64, [2, 3])]
    weights = [
        onnx.numpy_helper.from_array(x if x.dtype == np.int64 else x.astype(np.float32), name)
        for name, x in arrays.items()
    ]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return onnx.shape_inference.infer_shapes(made), arrays["table"].astype(np.float32)


def quantized(head: str, width: int = 128, extra: bool = False, bits: int = 8) -> tuple[onnx.ModelProto, np.ndarray]:
    given, table = model(head, width, extra)
    return ir.to_proto(blocked.quantize(ir.from_proto(given), blocked.Rounding(table_bits=bits))), table


@pytest.mark.parametrize("width", [128, 64, 96, 192])
@pytest.mark.parametrize("head", ["turned", "gemm", "own"])
def test_the_table_is_stored_once_in_8_bits(head: str, width: int) -> None:
    made, _ = quantized(head, width)
    onnx.checker.check_model(made)
    names = {tensor.name: tensor for tensor in made.graph.initializer}
    assert names["table.levels"].data_type == onnx.TensorProto.UINT8 and "table" not in names
    wide = [n for n in made.graph.node for a in n.attribute if a.name == "bits" and a.i == 8]
    assert len(wide) == (head != "own") and all(node.input[1] == "table.levels" for node in wide)
    if head == "own":
        assert {"own.levels", "w.levels", "table.levels"} <= names.keys()
    assert not any(node.op_type == "Transpose" for node in made.graph.node)
    numbers = [x for x in names.values() if x.data_type == onnx.TensorProto.FLOAT and np.prod(x.dims) >= 96 * width / 8]
    assert numbers == []
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    given, _ = model(head, width)
    (wanted,) = ReferenceEvaluator(given).run(None, {"tokens": TOKENS})
    (found,) = session.run(None, {"tokens": TOKENS})
    assert np.linalg.norm(found - wanted) < 0.15 * np.linalg.norm(wanted)


def test_rows_are_those_of_the_rounded_table_exactly() -> None:
    given, table = model("own")
    given.graph.output.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3, 128]))
    made = ir.to_proto(blocked.quantize(ir.from_proto(given)))
    rounded = round_in_blocks(np.ascontiguousarray(table.T), 8, 128).matrix().T
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(["x"], {"tokens": TOKENS})[0], rounded[TOKENS])
    assert np.abs(rounded - table).max() < 0.02 * np.abs(table).max()


def test_the_vocabulary_is_still_read_off_the_file() -> None:
    made, _ = quantized("turned")
    assert rows_of_table(OnnxFile.of_bytes(made.SerializeToString())) == 96


def test_a_table_that_others_read_stays() -> None:
    made, _ = quantized("turned", extra=True)
    assert "table" in {tensor.name for tensor in made.graph.initializer}


def test_small_tables_and_odd_widths_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LEAST", 96 * 128 + 1)
    assert "table" in {tensor.name for tensor in quantized("own")[0].graph.initializer}
    monkeypatch.setattr(tables, "LEAST", 1)
    assert "table" in {tensor.name for tensor in quantized("own", width=100)[0].graph.initializer}


def test_standard_operators_give_the_same() -> None:
    given, _ = model("turned")
    given.opset_import[0].version = 21
    made = blocked.quantize(ir.from_proto(given))
    plain = ir.from_proto(ir.to_proto(made))
    in_standard_operators(plain)
    assert Counter(node.domain for node in plain.graph).keys() == {""}
    proto = ir.to_proto(plain)
    (found,) = ReferenceEvaluator(proto).run(None, {"tokens": TOKENS})
    session = onnxruntime.InferenceSession(ir.to_proto(made).SerializeToString(), providers=["CPUExecutionProvider"])
    (same,) = session.run(None, {"tokens": TOKENS})
    assert np.linalg.norm(found - same) < 0.02 * np.linalg.norm(found)


@pytest.mark.parametrize("head", ["turned", "own"])
def test_the_table_in_4_bits_is_stored_once_and_looked_up_exactly(head: str) -> None:
    made, table = quantized(head, bits=4)
    onnx.checker.check_model(made, full_check=True)
    names = {tensor.name: tensor for tensor in made.graph.initializer}
    assert list(names["table.levels"].dims) == [96, 4, 16] and "table" not in names
    readers = [node.op_type for node in made.graph.node if "table.levels" in node.input]
    assert readers == (["Gather", "MatMulNBits"] if head == "turned" else ["Gather"])
    rounded = round_in_blocks(np.ascontiguousarray(table.T), 4, 32).matrix().T
    first = next(node for node in made.graph.node if node.op_type == "MatMulNBits").input[0]
    made.graph.output.append(onnx.helper.make_tensor_value_info(first, onnx.TensorProto.FLOAT, [2, 3, 128]))
    for run in (
        lambda: onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            [first], {"tokens": TOKENS}
        ),
        lambda: _in_openvino(made, first),
    ):
        np.testing.assert_array_equal(run()[0], rounded[TOKENS])


def _in_openvino(made: onnx.ModelProto, name: str) -> list[np.ndarray]:
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install 'localattn[openvino]'")
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(made.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return [compiled({"tokens": TOKENS})[name]]


def test_columns_that_matter_to_the_head_lose_less() -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((64, 64)).astype(np.float32)
    matters = np.ones(64, np.float32)
    matters[5] = 1e4
    plain = round_in_blocks(np.ascontiguousarray(table.T), 4, 32).matrix().T
    weighted = round_for_head(table, matters, 4, 32).matrix().T
    errors = [(np.square(made - table) * matters).sum() for made in (weighted, plain)]
    assert errors[0] < 0.7 * errors[1]
