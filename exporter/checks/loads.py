"""Check that onnxruntime loads the file."""

from __future__ import annotations

from ...core.documents.sidecar import CheckRecord
from ...runtime.backends.onnxruntime.session import open_file
from .checked_file import CheckedFile
from .outcome import passed


def check_loads(file: CheckedFile) -> CheckRecord:
    """Open the file on the CPU, which every machine has, and keep the session for the other checks.

    Those checks run the session a few times with long computations in between, so it keeps no memory between runs.

    Raises:
        MissingDependency: onnxruntime is not installed.
        UsageError: onnxruntime refuses the file.
    """
    file.session = open_file(file.path, provider="cpu", plugin="none", lean=True)  # checks the file's own functions
    return passed("; ".join((f"provider {file.session.provider}", *file.session.notes)))
