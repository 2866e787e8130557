"""The opsets that the tests export to: the supported ones that the installed onnxruntime runs."""

from __future__ import annotations

import onnx.parser
import onnxruntime as ort
import pytest


def _runs(opset: int) -> bool:
    """An older onnxruntime refuses a newer opset; that it is a clear error is the business of another test."""
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> g (float[1] x) => (float[1] y) {{ y = Neg(x) }}'
    model = onnx.parser.parse_model(text).SerializeToString()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception:
        return False
    return True


_RUN = {opset: _runs(opset) for opset in (18, 20, 23, 24)}
OPSETS = tuple(opset for opset, runs in _RUN.items() if runs)


def when_run(number: int) -> object:
    """A value to parametrize with, skipped where this onnxruntime does not run it."""
    reason = f"this onnxruntime does not run opset {number}"
    return pytest.param(number, marks=pytest.mark.skipif(not _RUN[number], reason=reason))
