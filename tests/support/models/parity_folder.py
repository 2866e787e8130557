"""Files of one small transformer, for tests of parity: with dynamic sizes, and step by step."""

from __future__ import annotations

from pathlib import Path

from localattn.exporter.export import ExportRequest, export

from ...conftest import TINY, save_upstream
from ...support.steps import export_steps


def open_and_steps(folder: Path) -> Path:
    """Writes `open.onnx`, `step.onnx` and its companion into a folder; their checkpoint, in it too."""
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", TINY)
    export(ExportRequest(checkpoint, folder / "open.onnx", dynamic=("batch", "seq")))
    export_steps(ExportRequest(checkpoint, folder / "step.onnx"), chunk=8)
    return checkpoint
