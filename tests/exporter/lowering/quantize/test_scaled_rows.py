"""`--weight-dtype fp8` and `int8-qdq`: rows scaled to the range of 8 bits, against plain numpy, and in TensorRT-RTX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import ExportFailed, UsageError
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.lowering.quantize.weights import check_weights, quantize_weights
from localattn.runtime.parity.runner import open_runner

from ....conftest import TINY, Finished, save_upstream
from ....support.models.engine_models import needs_rtx

# Its feed-forward is 170 wide.
WIDE = TINY | {"dim": 64, "dim_head": 32, "num_tokens": 64, "depth": 1}
PRODUCTS = 7 * WIDE["depth"] + 1
KINDS = {"fp8": (448.0, ml_dtypes.float8_e4m3fn), "int8-qdq": (127.0, np.int8)}


def layer(matrix: np.ndarray, *, gemm: bool) -> ir.Model:
    """A model of one linear layer; as Gemm its matrix is stored transposed."""
    kind = onnx.helper.np_dtype_to_tensor_dtype(matrix.dtype)
    attributes = {"transB": 1} if gemm else {}
    node = onnx.helper.make_node("Gemm" if gemm else "MatMul", ["x", "w"], ["y"], name="product", **attributes)
    tensor = onnx.helper.make_tensor_value_info
    rows, columns = matrix.shape
    graph = onnx.helper.make_graph(
        [node],
        "layer",
        [tensor("x", kind, [5, rows])],
        [tensor("y", kind, [5, columns])],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(matrix.T) if gemm else matrix, "w")],
    )
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    return ir.serde.deserialize_model(made)


def eight_bits(values: np.ndarray, kind: str) -> np.ndarray:
    """Round to the type's numbers, in float64."""
    _, dtype = KINDS[kind]
    return (np.rint(values) if dtype is np.int8 else values.astype(np.float32)).astype(dtype).astype(np.float64)


@pytest.mark.parametrize("gemm", [False, True])
@pytest.mark.parametrize("element", [np.float32, np.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_rounded_rows_and_columns(kind: str, element: type, gemm: bool) -> None:
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((64, 48)).astype(element)
    matrix[:, 3] = 0
    x = (rng.standard_normal((5, 64)) * np.array([[1e-3], [1], [50], [0], [1]])).astype(element)
    made = ir.serde.serialize_model(quantize_weights(layer(matrix, gemm=gemm), kind))
    onnx.checker.check_model(made, full_check=True)
    assert {tuple(t.dims) for t in made.graph.initializer if len(t.dims) == 2} == {(64, 48)}
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"x": x})
    largest, _ = KINDS[kind]
    exact, weights = x.astype(np.float64), matrix.astype(np.float64)
    row = np.maximum(np.abs(exact).max(1, keepdims=True), np.finfo(element).tiny)
    column = np.abs(weights).max(0) / largest
    column = np.where(column > 0, column, 1).astype(element).astype(np.float64)
    rounded = eight_bits(exact / row * largest, kind) / largest * row
    expected = rounded @ (eight_bits(weights / column, kind) * column)
    size = np.abs(exact) @ np.abs(weights)
    # A number that lies between two of 8 bits may be rounded either way; a sum has few of them.
    assert (np.abs(got - expected) <= (2e-3 if element is np.float32 else 1.5e-2) * size + 1e-30).all()
    assert not got[3].any() and not got[:, 3].any()
    error = np.sqrt(((got - exact @ weights) ** 2).mean() / ((exact @ weights) ** 2).mean())
    assert 1e-3 < error < {"fp8": 0.05, "int8-qdq": 0.012}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_has_a_say_in_another(kind: str) -> None:
    rng = np.random.default_rng(2)
    made = ir.serde.serialize_model(
        quantize_weights(layer(rng.standard_normal((64, 48)).astype("f4"), gemm=False), kind)
    )
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    x = rng.standard_normal((5, 64)).astype(np.float32)
    other = x.copy()
    other[2] *= 1e4
    (first,), (second,) = session.run(None, {"x": x}), session.run(None, {"x": other})
    np.testing.assert_array_equal(np.delete(first, 2, 0), np.delete(second, 2, 0))
    assert (first[2] != second[2]).all()


def test_a_matrix_with_nan_is_refused() -> None:
    with pytest.raises(ExportFailed, match="cannot be stored in fp8"):
        quantize_weights(layer(np.full((64, 48), np.nan, np.float32), gemm=False), "fp8")


@pytest.mark.parametrize(
    ("kind", "dtype", "opset", "message"),
    [
        ("fp8", "bf16", 20, "do not support bf16"),
        ("fp8", "fp32", 18, "need opset 19"),
        ("int8", "fp16", 20, "do not support fp16"),
    ],
)
def test_what_does_not_go_together_is_refused(kind: str, dtype: str, opset: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_weights(kind, dtype, opset, standard_ops=False)
    check_weights("int8-qdq", "fp16", 18, standard_ops=True)


@needs_rtx
@pytest.mark.parametrize(("kind", "dtype"), [("fp8", "fp16"), pytest.param("int8-qdq", "fp32", marks=pytest.mark.slow)])
def test_a_model_is_exported_checked_and_built(
    kind: str, dtype: str, tmp_path: Path, localattn: Callable[..., Finished]
) -> None:
    path = tmp_path / "m.onnx"
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", WIDE)
    export(ExportRequest(checkpoint, path, dtype=dtype, weight_dtype=kind, seeds=(0,)))
    sidecar = read_sidecar(path)
    assert sidecar is not None and sidecar.options == {"weight_dtype": kind} and sidecar.dtype == dtype
    assert {check.status for check in sidecar.checks} <= {"passed", "not proven"}
    counts = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert counts["QuantizeLinear"] == PRODUCTS and counts["DequantizeLinear"] == 2 * PRODUCTS
    assert open_runner(path).precision == kind
    built = ("build", path, "--backend", "tensorrt-rtx", "--plugin", "none", "--force")
    finished = localattn(*built, "--target", "rtx40,rtx50")
    assert finished.code == 0, finished.err
    # Ampere has no fp8.
    finished = localattn(*built, "--target", "rtx30")
    assert finished.code == (2 if kind == "fp8" else 0)
    assert kind != "fp8" or "m.onnx has numbers in fp8, and sm_86 cannot multiply them." in finished.err
