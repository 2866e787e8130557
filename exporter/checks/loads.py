"""Check that ONNX's full checker accepts the file and onnxruntime loads it."""

from __future__ import annotations

from pathlib import Path

from ...core.documents.sidecar import CheckRecord
from ...core.error_texts import first_line
from ...runtime.backends.onnxruntime.session import open_file
from .checked_file import CheckedFile
from .outcome import failed, passed


def check_model(path: Path) -> CheckRecord:
    """Run ONNX's full checker with shape inference; give it the path, so that it finds external data."""
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return failed(first_line(error))
    return passed("full check, with shape inference")


def check_loads(file: CheckedFile) -> CheckRecord:
    """Open the file on the CPU, which every machine has, and keep the session for the other checks.

    Those checks run the session a few times with long computations in between, so it keeps no memory between runs.

    Raises:
        MissingDependency: onnxruntime is not installed.
        UsageError: onnxruntime refuses the file.
    """
    file.session = open_file(file.path, provider="cpu", plugin="none", lean=True)  # checks the file's own functions
    return passed("; ".join((f"provider {file.session.provider}", *file.session.notes)))
