"""Check that ONNX's full checker accepts a file."""

from __future__ import annotations

from pathlib import Path

from ...core.documents.sidecar import CheckRecord
from ...core.error_texts import first_line
from .outcome import failed, passed


def check_model(path: Path) -> CheckRecord:
    """Run ONNX's full checker with shape inference; give it the path, so that it finds external data."""
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return failed(first_line(error))
    return passed("full check, with shape inference")
