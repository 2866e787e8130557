"""`--weight-dtype int4`: matrices in blocks of 4 bits, what they cost in accuracy, and their standard form."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import CheckFailed, ExportFailed, MissingDependency, UsageError
from localattn.core.tolerance import TOLERANCES
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.lowering.quantize import blocked, blocks
from localattn.exporter.lowering.quantize.blocks import BLOCK, round_in_blocks
from localattn.exporter.lowering.quantize.weights import check_weights
from localattn.onnx_graph.block_weights import in_standard_operators, packed, unpacked
from localattn.onnx_graph.onnx_file import OnnxFile
from localattn.runtime.parity.runner import open_runner

from ....conftest import TINY, Finished, save_upstream
from ....support.steps import export_steps

# Its feed-forward is 170 wide: five blocks and ten rows of a sixth.
WIDE = TINY | {"dim": 64, "dim_head": 32, "num_tokens": 64, "depth": 1}
PRODUCTS = 7 * WIDE["depth"] + 1  # q, k, v, out, two and one of the feed-forward; logits


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices are wide enough to be stored in 4 bits."""
    return save_upstream(tmp_path_factory.mktemp("wide"), "local_attention.LocalTransformer", WIDE)


@pytest.fixture(scope="module")
def exported(wide: Path) -> Path:
    """Its file."""
    target = wide.with_name("m.onnx")
    export(ExportRequest(wide, target, weight_dtype="int4"))
    return target


def naive(matrix: np.ndarray, rows: int, column: int) -> float:
    """Least squared error of one block over every scale of a fine grid and every zero point, in float64."""
    block = matrix[rows : rows + BLOCK, column].astype(np.float64)
    span, best = max(block.max(), 0) - min(block.min(), 0), np.inf
    for scale in span / 15 * np.linspace(0.6, 1.1, 101):
        for zero in range(16):
            levels = np.clip(np.rint(block / scale + zero), 0, 15)
            best = min(best, float((((levels - zero) * scale - block) ** 2).sum()))
    return best


def test_blocks_come_close_to_the_best_scale_and_zero_point() -> None:
    matrix = np.random.default_rng(0).standard_normal((96, 8)).astype(np.float32)
    made = round_in_blocks(matrix)
    rounded = made.matrix()
    errors = ((rounded - matrix).astype(np.float64) ** 2).reshape(3, BLOCK, 8).sum(1)
    least = np.array([[naive(matrix, BLOCK * row, column) for column in range(8)] for row in range(3)])
    assert (errors >= least * 0.999).all() and errors.sum() < 1.1 * least.sum()
    assert made.levels.max() < 16 and np.abs(rounded - matrix).max() < np.abs(matrix).max() / 5


def test_zero_points_err_less_than_symmetric_blocks() -> None:
    matrix = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    cut = matrix.reshape(8, BLOCK, 256)
    furthest = np.take_along_axis(cut, np.abs(cut).argmax(1)[:, None], 1)
    symmetric = np.clip(np.rint(cut / (furthest / -8)), -8, 7) * (furthest / -8)
    ours = ((round_in_blocks(matrix).matrix() - matrix) ** 2).mean()
    assert ours < 0.87 * ((symmetric - cut) ** 2).mean()


@pytest.mark.parametrize("rows", [32, 33, 170])
def test_blocks_of_zeros_constants_and_tiny_numbers(rows: int) -> None:
    for value in (0.0, 1.5, -2.0, 1e-30, -1e-44):
        matrix = np.full((rows, 40), value, np.float32)
        found = round_in_blocks(matrix).matrix()
        np.testing.assert_allclose(found, matrix, rtol=1e-6, atol=1e-37)


def test_a_part_of_the_columns_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.random.default_rng(2).standard_normal((70, 50)).astype(np.float32)
    whole = round_in_blocks(matrix)
    monkeypatch.setattr(blocks, "_PART", 1)
    parts = round_in_blocks(matrix)
    for name in ("levels", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))


def test_packing_is_undone_at_even_and_odd_ends() -> None:
    levels = np.random.default_rng(3).integers(0, 16, (3, 5)).astype(np.uint8)
    assert packed(levels).shape == (3, 3) and packed(levels)[0, 0] == levels[0, 0] + 16 * levels[0, 1]
    np.testing.assert_array_equal(unpacked(packed(levels), 5), levels)


def test_linear_layers_have_4_bits_and_nothing_else(wide: Path, exported: Path) -> None:
    model = onnx.load(exported)
    counts = Counter(node.op_type for node in model.graph.node)
    assert counts["MatMulNBits"] == PRODUCTS and counts["WindowedAttention"] == WIDE["depth"]
    sizes = {(entry.i) for n in model.graph.node for entry in n.attribute if entry.name == "K"}
    assert any(size % BLOCK for size in sizes), "a matrix whose rows fill no last block"
    wide_floats = [
        t.name for t in model.graph.initializer if t.data_type == 1 and len(t.dims) == 2 and min(t.dims) > 63
    ]
    assert wide_floats == ["model.token_emb.weight", "model.positions"], "the embeddings stay"
    modules = {p.value for n in model.graph.node if n.op_type == "MatMulNBits" for p in n.metadata_props}
    assert any("branch" in module for module in modules)


def test_the_file_is_judged_by_its_own_tolerance_and_its_whole_window(exported: Path) -> None:
    sidecar = read_sidecar(exported)
    assert sidecar is not None and sidecar.options == {"weight_dtype": "int4"} and sidecar.dtype == "fp32"
    checks = {check.name: check for check in sidecar.checks}
    assert {check.status for check in checks.values()} <= {"passed", "not proven"}
    assert f"(tolerance {TOLERANCES['int4'].describe()})" in checks["parity"].detail
    assert checks["graph before rounding"].figures["max_abs"] < 1e-4
    assert 0 < checks["rounded weights"].figures["furthest"] < 0.2
    assert checks["parity"].figures["max_abs"] > 1e-4 and checks["parity"].figures["agreement"] > 0.6
    # Unlike dynamic int8, no token has a say in the scales of others.
    assert "through 1 layer(s)" in checks["window"].detail or "through 2 layer(s)" in checks["window"].detail


def test_the_command_states_its_parity_again_without_a_sidecar_too(
    localattn: Callable[..., Finished], wide: Path, exported: Path, tmp_path: Path
) -> None:
    again = localattn("parity", exported, "--against", wide, "--format", "json")
    assert again.code == 0, again.err
    shown = json.loads(again.out)
    assert shown["dtype"] == "int4" and shown["overall"][0]["agreement"] > 0.6
    bare = tmp_path / "bare.onnx"
    bare.write_bytes(exported.read_bytes())
    assert open_runner(bare).precision == "int4"


def test_a_spoiled_file_fails(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = blocked.round_in_blocks

    def spoiled(matrix: np.ndarray, *options: Any) -> blocks.Blocks:
        made = right(matrix, options[-1])
        return blocks.Blocks(made.levels, made.scales * np.float32(1.3), made.zeros, made.rows, made.bits)

    for name in ("round_in_blocks", "round_for_inputs"):
        monkeypatch.setattr(blocked, name, spoiled)
    with pytest.raises(CheckFailed, match="rounded weights"):
        export(ExportRequest(wide, tmp_path / "m.onnx", weight_dtype="int4"))
    assert not (tmp_path / "m.onnx").exists()


def test_standard_operators_compute_the_same(wide: Path, exported: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.onnx"
    report = export(ExportRequest(wide, plain, weight_dtype="int4", standard_ops=True, opset=21))
    model = onnx.load(plain)
    assert {entry.domain for entry in model.opset_import} == {""}
    assert sum(node.op_type == "DequantizeLinear" for node in model.graph.node) == PRODUCTS
    assert {check.status for check in report.sidecar.checks} <= {"passed", "not proven"}
    tokens = np.random.default_rng(0).integers(0, 64, tuple(report.sidecar.inputs[0].shape))
    found = [
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"tokens": tokens})[0]
        for path in (exported, plain)
    ]
    np.testing.assert_allclose(*found, atol=1e-3)
    # ONNX's own definition, in which no activation is rounded.
    (defined,) = ReferenceEvaluator(model).run(None, {"tokens": tokens})
    assert np.sqrt(((defined - found[1]) ** 2).mean() / (defined**2).mean()) < 0.03


def test_onnxruntime_joins_the_standard_form_again(wide: Path, tmp_path: Path) -> None:
    plain, seen = tmp_path / "plain.onnx", tmp_path / "seen.onnx"
    export(ExportRequest(wide, plain, weight_dtype="int4", standard_ops=True, opset=21, checks="quick"))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(seen)
    onnxruntime.InferenceSession(plain, options, providers=["CPUExecutionProvider"])
    counts = Counter(node.op_type for node in onnx.load(seen).graph.node)
    assert counts["MatMulNBits"] == PRODUCTS and not counts["DequantizeLinear"]


def test_what_does_not_go_together_is_refused(
    localattn: Callable[..., Finished], wide: Path, exported: Path, tmp_path: Path
) -> None:
    target = tmp_path / "m.onnx"
    for options, text in (
        (["--dtype", "fp16"], "int4 weights do not support fp16"),
        (["--standard-ops"], "--opset 21"),
    ):
        done = localattn("export", wide, "-o", target, "--weight-dtype", "int4", *options)
        assert done.code == 2 and text in done.err, done.err
    with pytest.raises(UsageError, match="opset 21"):
        export_steps(ExportRequest(wide, target, weight_dtype="int4", standard_ops=True))
    done = localattn("convert", exported, "-o", target, "--standard-ops")
    assert done.code == 2 and "--opset 21" in done.err and not target.exists()
    narrow = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY | {"dim": 8, "num_tokens": 9})
    with pytest.raises(ExportFailed, match="no layer to quantize"):
        export(ExportRequest(narrow, target, weight_dtype="int4"))


def test_a_matrix_with_nan_is_refused() -> None:
    model = ir.serde.deserialize_model(_product(np.full((32, 32), np.nan, np.float32)))
    with pytest.raises(ExportFailed, match="NaN"):
        blocked.quantize(model)


@pytest.mark.parametrize("transposed", [False, True])
def test_gemm_and_matmul_share_a_matrix_that_both_read(transposed: bool) -> None:
    matrix = np.random.default_rng(4).standard_normal((64, 96)).astype(np.float32)
    given = _product(matrix.T if transposed else matrix, transposed=transposed, times=2)
    model = blocked.quantize(ir.serde.deserialize_model(given))
    assert len(model.graph.initializers) == 3
    x = np.random.default_rng(5).standard_normal((4, 64)).astype(np.float32)
    rounded = round_in_blocks(matrix).matrix()
    in_standard = ir.serde.deserialize_model(ir.serde.serialize_model(model))
    in_standard_operators(in_standard)
    assert [node.domain for node in in_standard.graph] == [""] * 4 and len(in_standard.graph.initializers) == 3
    for made in (model, in_standard):
        proto = ir.serde.serialize_model(made)
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        for found in session.run(None, {"x": x}):
            assert np.abs(found - x @ rounded).max() < 0.02 * np.abs(x @ rounded).max()


def test_step_and_prefill_files_share_the_matrices(localattn: Callable[..., Finished], wide: Path) -> None:
    step = wide.with_name("s.onnx")
    done = localattn("export", wide, "-o", step, "--weight-dtype", "int4", "--mode", "step", "--chunk", "8")
    assert done.code == 0, done.err
    assert len(list(wide.parent.glob("s.onnx.*.data"))) == 1
    places = []
    for path in (step, step.with_name("s.prefill.onnx")):
        model = onnx.load(path, load_external_data=False)
        levels = [t for t in model.graph.initializer if t.name.endswith(".levels")]
        assert len(levels) >= 5 * WIDE["depth"] + 1
        places.append({tuple(entry.value for entry in t.external_data[:2]) for t in levels})
        sidecar = read_sidecar(path)
        assert sidecar is not None and sidecar.options == {"weight_dtype": "int4"}
    assert places[0] == places[1] and len(places[0]) == len(levels)
    made = localattn("generate", step, "--prompt-ids", "1,2,3", "--max-tokens", "4", "--format", "json")
    assert made.code == 0 and len(json.loads(made.out)["tokens"][0]) == 4, made.err


@pytest.mark.slow
def test_standard_step_files_share_them_too(wide: Path, tmp_path: Path) -> None:
    request = ExportRequest(wide, tmp_path / "s.onnx", weight_dtype="int4", standard_ops=True, opset=21)
    reports = export_steps(request, chunk=8)
    assert len(list(tmp_path.glob("*.data"))) == 1
    for report in reports:
        assert {x.domain for x in OnnxFile.read(report.path).parse().opset_import} == {""}


def _product(matrix: np.ndarray, *, transposed: bool = False, times: int = 1) -> onnx.ModelProto:
    """A model of linear layers that read one matrix: MatMul, or Gemm with the transposed one."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    rows, columns = matrix.shape[:: -1 if transposed else 1]
    nodes = [
        helper.make_node("Gemm", ["x", "w"], [f"y{i}"], name=f"n{i}", transB=1)
        if transposed
        else helper.make_node("MatMul", ["x", "w"], [f"y{i}"], name=f"n{i}")
        for i in range(times)
    ]
    outputs = [helper.make_tensor_value_info(f"y{i}", kind, ["b", columns]) for i in range(times)]
    inputs = [helper.make_tensor_value_info("x", kind, ["b", rows])]
    weights = [onnx.numpy_helper.from_array(np.ascontiguousarray(matrix), "w")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_a_head_that_reads_the_table_of_embeddings_gets_a_matrix_of_its_own() -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((96, 64)).astype(np.float32)
    nodes = [
        onnx.helper.make_node("Gather", ["table", "tokens"], ["x"]),
        onnx.helper.make_node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        onnx.helper.make_node("MatMul", ["x", "turned"], ["logits"]),
    ]
    inputs = [onnx.helper.make_tensor_value_info("tokens", onnx.TensorProto.INT64, [1, 5])]
    outputs = [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [1, 5, 96])]
    graph = onnx.helper.make_graph(nodes, "tied", inputs, outputs, [onnx.numpy_helper.from_array(table, "table")])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    made = ir.to_proto(blocked.quantize(ir.from_proto(proto)))
    assert Counter(node.op_type for node in made.graph.node) == {"Gather": 1, "MatMulNBits": 1}
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    tokens = np.array([[3, 95, 0, 41, 7]])
    found, wanted = session.run(None, {"tokens": tokens})[0], table[tokens] @ table.T
    assert np.linalg.norm(found - wanted) < 0.12 * np.linalg.norm(wanted)


def test_an_older_onnxruntime_is_one_clear_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the work begins; kinds that it computes are not concerned."""
    monkeypatch.setattr(onnxruntime, "__version__", "1.21.1")
    with pytest.raises(MissingDependency, match=r"(?s)1\.22 or later.*1\.21\.1.*int8-dynamic"):
        check_weights("int8", "fp32", 20, standard_ops=False)
    for kind in ("int8-dynamic", "int4", "int8-qdq", None):
        check_weights(kind, "fp32", 20, standard_ops=False)
    monkeypatch.setattr(onnxruntime, "__version__", "1.22.0")
    check_weights("int8", "fp32", 20, standard_ops=False)
