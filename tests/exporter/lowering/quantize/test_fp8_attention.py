"""`--attention-dtype fp8`: pairs around query, key and value; what they cost; and what becomes of them in an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from localattn.core.documents.engine_sidecar import read_engine_sidecar
from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import UsageError
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.lowering.quantize.fp8_attention import check_attention
from localattn.onnx_graph.gpu_nodes import gpu_nodes
from localattn.onnx_graph.precision import fp8_attention
from localattn.plugins.library.selection import needed_by
from localattn.runtime.parity.runner import open_runner

from ....conftest import TINY, Finished, save_upstream
from ....support.models.engine_models import needs_plugin_tools, needs_rtx

MODEL = TINY | {"dim": 64, "dim_head": 64, "num_tokens": 64, "depth": 2}


def exported(tmp_path: Path, dtype: str = "fp16", **options: object) -> Path:
    path = tmp_path / "m.onnx"
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", MODEL)
    export(ExportRequest(checkpoint, path, dtype=dtype, attention_dtype="fp8", seeds=(0,), **options))
    return path


def test_a_file_is_exported_checked_and_read_as_fp8(tmp_path: Path) -> None:
    path = exported(tmp_path)
    sidecar = read_sidecar(path)
    assert sidecar is not None and sidecar.options == {"attention_dtype": "fp8"} and sidecar.dtype == "fp16"
    assert {check.status for check in sidecar.checks} <= {"passed", "not proven"}
    assert open_runner(path).precision == "fp8"
    model = onnx.load(path)
    counts = Counter(node.op_type for node in model.graph.node)
    assert counts["QuantizeLinear"] == counts["DequantizeLinear"] == 3 * MODEL["depth"]
    scales = {t.name: float(numpy_helper.to_array(t)) for t in model.graph.initializer if t.name.endswith(".scale")}
    assert all(np.log2(scale) % 1 == 0 for scale in scales.values()) and len(scales) == 6
    eight = fp8_attention.apply(model)
    onnx.checker.check_model(eight)
    counts = Counter(node.op_type for node in eight.graph.node)
    assert counts["QuantizeLinear"] == 6 and not counts["DequantizeLinear"]
    for before, after in zip(gpu_nodes(model), gpu_nodes(eight), strict=True):
        assert (before.dtype, after.dtype, after.head_dim) == ("fp16", "fp8", 64) and before.name == after.name
        wide, narrow = (next(a.f for a in node.proto.attribute if a.name == "scale") for node in (before, after))
        query, key = (scales[f"{before.name}.{name}.scale"] for name in ("query", "key"))
        assert narrow == pytest.approx(wide * query * key, rel=1e-6)
    assert {spec.name for spec in needed_by(path)} == {"localattn_fp8_d64"}


@pytest.mark.slow
def test_scales_leave_room(tmp_path: Path) -> None:
    """The largest number of a run takes up an eighth to a quarter of what E4M3 has."""
    path = exported(tmp_path, "fp32", checks="quick")
    model = onnx.load(path)
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(node.input[0]))
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    tokens = np.random.default_rng(5).integers(0, 64, [int(x) for x in session.get_inputs()[0].shape])
    found = dict(zip([x.name for x in session.get_outputs()], session.run(None, {"tokens": tokens}), strict=True))
    scales = {t.name: float(numpy_helper.to_array(t)) for t in model.graph.initializer if t.name.endswith(".scale")}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            share = np.abs(found[node.input[0]]).max() / scales[node.input[1]] / 448
            assert 0.08 < share < 0.4, (node.name, share)


@pytest.mark.parametrize(
    ("kind", "dtype", "opset", "message"),
    [
        ("fp8", "bf16", 20, "does not support bf16"),
        ("fp8", "fp32", 18, "needs opset 19"),
        ("int8", "fp32", 20, "Unknown element type 'int8' of attention"),
    ],
)
def test_what_does_not_go_together_is_refused(kind: str, dtype: str, opset: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_attention(kind, dtype, opset)
    check_attention(None, "bf16", 18)


def test_a_model_without_a_kernel_of_fp8_is_refused(tmp_path: Path, localattn: Callable[..., Finished]) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", {**MODEL, "use_xpos": True})
    finished = localattn("export", checkpoint, "-o", tmp_path / "m.onnx", "--attention-dtype", "fp8")
    assert finished.code == 2 and "No attention node of the model can be computed in fp8." in finished.err
    finished = localattn("export", checkpoint, "-o", tmp_path / "m.onnx", "--attention-dtype", "fp8", "--mode", "step")
    assert finished.code == 2 and "--attention-dtype fp8 cannot be combined with --mode step" in finished.err


@needs_rtx
@needs_plugin_tools
@pytest.mark.slow
def test_an_engine_has_plugins_that_read_fp8(tmp_path: Path, localattn: Callable[..., Finished]) -> None:
    path, engine = exported(tmp_path), tmp_path / "m.engine"
    built = ("build", path, "-o", engine, "--backend", "tensorrt-rtx", "--plugin", "library")
    finished = localattn(*built, "--target", "rtx30")
    assert finished.code == 2 and "m.onnx has numbers in fp8, and sm_86 cannot multiply them." in finished.err
    finished = localattn(*built, "--target", "rtx40")
    assert finished.code == 0, finished.err
    sidecar = read_engine_sidecar(engine)
    checks = {check.name: check for check in sidecar.checks}
    assert checks["plugin in network"].status == "passed" and sidecar.plugin is not None
    assert [(kernel.dtype, kernel.head_dim) for kernel in sidecar.plugin.kernels] == [("fp8", 64)]
    shown = localattn("inspect", engine, "--format", "json")
    assert '"fp8"' in shown.out
