"""The proof that the rows of a batch are independent: what it accepts, and every way in which rows can interact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from localattn.core.documents.sidecar import read_sidecar
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.triton import Serving
from localattn.runtime.inputs.rows import ROWS, check_rows, rows_stay_apart
from localattn.runtime.session import load

from ...conftest import TINY, save_upstream

Run = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _attended(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Attention of every position to the unmasked ones of its own row."""
    x, mask = inputs["x"], inputs["mask"]
    scores = np.where(mask[:, None, :], x @ x.transpose(0, 2, 1), -1e9)
    return {"y": _softmax(scores) @ x}


def _rounded(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max() / 127
    return (np.round(x / scale) * scale).astype(x.dtype)


WRONG: dict[str, Run] = {
    "sum along axis 0": lambda x: {"y": x["x"].cumsum(0)},
    "scale of the whole tensor": lambda x: {"y": _rounded(x["x"])},
    "mean of the batch": lambda x: {"y": x["x"] - 1e-6 * x["x"].mean(0)},
    "longest mask": lambda x: {"y": x["x"] * x["mask"].sum(1).max()},
    "order": lambda x: {"y": x["x"] + np.arange(len(x["x"]), dtype=np.float32)[:, None, None]},
    "fewer rows": lambda x: {"y": x["x"][:1]},
    "nothing": lambda x: {"y": np.zeros_like(x["x"])},
    "sign of infinity": lambda x: {"y": np.where(x["mask"][..., None], x["x"], np.inf if len(x["x"]) > 1 else -np.inf)},
}


def _example() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)
    return {"x": x, "mask": np.ones((2, 6), np.bool_)}


def test_rows_that_are_independent_pass() -> None:
    record = check_rows(_attended, [_example()], "fp32")
    assert record.status == "passed", record.detail
    assert rows_stay_apart(_attended, _example(), [])


@pytest.mark.parametrize("kind", WRONG)
def test_rows_that_interact_do_not(kind: str) -> None:
    record = check_rows(WRONG[kind], [_example()], "fp32")
    assert (record.name, record.status) == (ROWS, "not proven")


def test_a_fixed_batch_is_tried_bit_for_bit() -> None:
    wrong = {kind for kind, run in WRONG.items() if not _apart(run)}
    assert {"sum along axis 0", "scale of the whole tensor", "mean of the batch"} <= wrong


def _apart(run: Run) -> bool:
    try:
        return rows_stay_apart(run, _example(), [])
    except IndexError:
        return False


def test_an_export_with_an_open_batch_says_that_its_rows_are_independent(tmp_path: Path) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", {**TINY, "depth": 1})
    shapes = ShapeRequest(seq_len=16, mask=True)
    export(ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=shapes, dynamic=("batch", "seq"), checks="quick"))
    sidecar = read_sidecar(tmp_path / "m.onnx")
    assert sidecar is not None
    (record,) = [check for check in sidecar.checks if check.name == ROWS]
    assert record.status == "passed", record.detail


def test_int8_scales_span_the_batch(tmp_path: Path) -> None:
    wide = TINY | {"dim": 32, "dim_head": 16, "depth": 1}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", wide)
    shapes = ShapeRequest(seq_len=16)
    model = tmp_path / "m.onnx"
    report = export(
        ExportRequest(checkpoint, model, shapes=shapes, weight_dtype="int8-dynamic", dynamic=("batch",), checks="quick")
    )
    (record,) = [check for check in report.sidecar.checks if check.name == ROWS]
    assert record.status == "not proven" and "int8" in record.detail
    # What the record says is so: the same row gives other numbers beside another one.
    session = load(model, provider="cpu", plugin="none")
    tokens = np.random.default_rng(0).integers(0, 23, (2, 16))
    others = np.concatenate([tokens[:1], (tokens[1:] + 7) % 23])
    first, second = (session.run({"tokens": x})["logits"][0] for x in (tokens, others))
    assert not np.array_equal(first, second)
    created = create_bundle(BundleRequest(model, tmp_path / "b", triton=Serving()))
    config = (tmp_path / "b/triton/m/config.pbtxt").read_text()
    assert "max_batch_size: 0" in config and "dynamic_batching" not in config
    assert any("int8" in note for note in created.notes)


def test_a_step_file_of_few_tokens_can_be_quantized(tmp_path: Path) -> None:
    """A logits matrix narrower than what is quantized: onnxruntime before 1.32 turned it and kept its old shape."""
    from ...support.steps import export_steps

    wide = TINY | {"dim": 32, "dim_head": 16, "depth": 1}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", wide)
    report = export_steps(ExportRequest(checkpoint, tmp_path / "s.onnx", weight_dtype="int8-dynamic", checks="quick"))[
        0
    ]
    assert {check.name: check.status for check in report.sidecar.checks}["parity"] == "passed"
    kinds = {node.op_type for node in onnx.load(report.path, load_external_data=False).graph.node}
    assert "MatMulInteger" in kinds


def test_the_quantizer_sees_no_shapes_of_constants(tmp_path: Path) -> None:
    from localattn.exporter.lowering.quantize.dynamic_int8 import _forget_shapes_of_constants

    helper = onnx.helper
    tensor, w = helper.make_tensor_value_info, onnx.numpy_helper.from_array(np.ones((3, 4), np.float32), "w")
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Gemm", ["r", "w"], ["y"], transB=1)]
    x, y = tensor("x", 1, [2, 4]), tensor("y", 1, [2, 3])
    known = [tensor("w", 1, [3, 4]), tensor("r", 1, [2, 4])]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y], [w], value_info=known)), tmp_path / "m.onnx")
    _forget_shapes_of_constants(tmp_path / "m.onnx")
    assert [value.name for value in onnx.load(tmp_path / "m.onnx").graph.value_info] == ["r"]
