"""The advice of a build that is refused is followed, and an engine is built."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from localattn.exporter.jobs.convert import to_standard_ops

from ...conftest import Finished
from ...support.models.engine_models import needs_rtx, small_model

pytestmark = needs_rtx
CHECKPOINT = "small.pt"


def build(localattn: Callable[..., Finished], path: Path, target: str = "rtx40") -> Finished:
    return localattn(
        "build", path, "--backend", "tensorrt-rtx", "--plugin", "none", "--target", target, "-q", "--force"
    )


def exported(localattn: Callable[..., Finished], path: Path, *options: str) -> Path:
    checkpoint = small_model().with_name(CHECKPOINT)
    done = localattn("export", checkpoint, "-o", path, "--checks", "quick", "-q", "--force", *options)
    assert done.code == 0, done.err
    return path


def dynamic(source: Path, path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, path)


def static(source: Path, path: Path) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.calibrate import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [{"tokens": np.arange(64).reshape(1, 64) % 23}]

        def get_next(self) -> dict[str, Any] | None:
            return self.left.pop() if self.left else None

    options = {"activation_type": QuantType.QUInt8, "op_types_to_quantize": ["MatMul"]}
    quantize_static(source, path, Reader(), quant_format=QuantFormat.QDQ, **options)


@pytest.mark.parametrize("quantize", [dynamic, static])
def test_a_quantised_file_names_kinds_of_weights_that_build(
    quantize: Callable[[Path, Path], None],
    localattn: Callable[..., Finished],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    plain, path = tmp_path / "plain.onnx", tmp_path / "quantised.onnx"
    to_standard_ops(small_model(), plain)
    quantize(plain, path)
    refused = build(localattn, path)
    assert refused.code == 5, refused.err
    named = re.findall(r"--weight-dtype (\S+?)[\s),]", refused.err)
    assert named == ["int8-qdq", "fp8"]
    for kind in named if quantize is dynamic else ():
        done = build(localattn, exported(localattn, tmp_path / f"{kind}.onnx", "--weight-dtype", kind))
        assert done.code == 0, done.err


def test_fp8_for_a_gpu_without_it_names_what_builds_there(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    refused = build(localattn, exported(localattn, tmp_path / "m.onnx", "--weight-dtype", "fp8"), "rtx30")
    assert refused.code == 2 and "export with int8-qdq weights" in refused.err
    done = build(localattn, exported(localattn, tmp_path / "m.onnx", "--weight-dtype", "int8-qdq"), "rtx30")
    assert done.code == 0, done.err


def test_external_data_that_is_missing_is_copied_beside_it(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    path, data = tmp_path / "m.onnx", tmp_path / "m.data"
    onnx.save(onnx.load(small_model()), path, save_as_external_data=True, location=data.name, size_threshold=1024)
    away = data.rename(tmp_path / "away")
    refused = build(localattn, path)
    assert refused.code == 2 and "Copy the file that holds the weights next to it, under its name." in refused.err
    away.rename(data)
    done = build(localattn, path)
    assert done.code == 0, done.err
