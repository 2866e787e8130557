"""The table of what onnxruntime reads, and the advice for a file that is too new for one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from localattn.core.versions import ONNXRUNTIME_READS, OPSETS, ir_of_opset, too_new

# As onnxruntime 1.16.3 and 1.20.1 wrote them.
IR = (
    "[ONNXRuntimeError] : 1 : FAIL : Load model from /tmp/m.onnx failed:/onnxruntime_src/onnxruntime/core/graph/"
    "model.cc:149 onnxruntime::Model::Model(...) Unsupported model IR version: {}, max supported IR version: {}"
)
OPSET = (
    "ONNX Runtime only *guarantees* support for models stamped with official released onnx opset versions. Opset {} is "
    "under development and support for this is limited. The operator schemas and or other functionality may change "
    "before next ONNX release and in this case ONNX Runtime will not guarantee backward compatibility. Current "
    "official support for domain ai.onnx is till opset {}."
)


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (IR.format(10, 9), "Update onnxruntime to 1.18 or later, or export again with `opset=20`."),
        (IR.format(9, 8), "Update onnxruntime to 1.16 or later, or export again with `opset=18`."),
        (IR.format(10, 7), "Update onnxruntime to 1.18 or later."),
        (OPSET.format(20, 19), "Update onnxruntime to 1.17 or later, or export again with `opset=19`."),
        (OPSET.format(23, 21), "Update onnxruntime to 1.23 or later, or export again with `opset=21`."),
        (OPSET.format(90, 28), "Update onnxruntime, or export again with `opset=24`."),
        ("No graph was found in the protobuf.", ""),
        (
            "nbits_ == 4 was false. Only 4b quantization is supported for MatMulNBits op, additional bits support is "
            "planned.",
            "Update onnxruntime to 1.22 or later, or export again with `weight_dtype='int8-dynamic'`.",
        ),
    ],
)
def test_what_helps(reason: str, advice: str) -> None:
    assert too_new(reason) == advice


def test_an_ir_version_is_the_oldest_that_has_its_opset() -> None:
    """ONNX's own table, where it says less than what is used here, and functions, which need IR 8."""
    for opset in OPSETS:
        own = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)], ignore_unknown=True)
        assert ir_of_opset(opset) == min(10, max(8, own))


def test_releases_read_more_and_more() -> None:
    reads = list(ONNXRUNTIME_READS.values())
    assert reads == sorted(reads)


@pytest.mark.parametrize("opset", [18, 20, 21])
def test_exported_files_have_it(opset: int, tmp_path: Path) -> None:
    from localattn.exporter.export import ExportRequest, export
    from localattn.runtime import load

    from ..conftest import TINY, save_upstream

    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY)
    report = export(ExportRequest(checkpoint, tmp_path / "m.onnx", opset=opset, checks="quick"))
    model = onnx.load(report.path)
    assert (model.ir_version, model.opset_import[0].version) == (ir_of_opset(opset), opset)
    onnx.checker.check_model(model, full_check=True)
    session = load(report.path)
    session.run({spec.name: np.zeros(spec.shape, spec.dtype) for spec in session.inputs})
