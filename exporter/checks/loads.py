"""Check: ONNX's full checker accepts the file and onnxruntime loads it."""

from __future__ import annotations

from pathlib import Path

from ...core.documents.sidecar import CheckRecord
from ...core.error_texts import first_line
from ...runtime.ort.session import open_file
from ...runtime.session import Session


def check_model(path: Path) -> CheckRecord:
    """Run ONNX's full checker with shape inference; on the path, so that external data is found."""
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return CheckRecord(name="onnx checker", status="failed", detail=first_line(error))
    return CheckRecord(name="onnx checker", status="passed", detail="full check, with shape inference")


def check_loads(path: Path) -> tuple[CheckRecord, Session]:
    """Open the file on the CPU, which every machine has, and return the session for the other checks.

    Those checks run the session a few times with long computations in between, so it keeps no memory between runs.

    Raises:
        MissingDependency: onnxruntime is not installed.
        UsageError: onnxruntime refuses the file.
    """
    session = open_file(path, provider="cpu", plugin="none", lean=True)  # checks the file's own functions
    detail = "; ".join((f"provider {session.provider}", *session.notes))
    return CheckRecord(name="onnxruntime loads", status="passed", detail=detail), session
