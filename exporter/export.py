"""`export`: write a checkpoint as an ONNX file that has passed its checks, or as step files."""

from __future__ import annotations

from .checkpoint.open_checkpoint import OpenedCheckpoint
from .export_report import ExportReport
from .jobs.checkpoint import CheckpointJob, open_request
from .jobs.steps import StepsJob
from .options import ExportRequest
from .pipeline import Progress, run

__all__ = ["ExportReport", "ExportRequest", "export", "open_request"]


def export(
    request: ExportRequest, progress: Progress = lambda _: None, opened: OpenedCheckpoint | None = None
) -> ExportReport:
    """Export a checkpoint, check the file and move it to its place; for step files also the file for prompts.

    Args:
        request: what to export.
        progress: called with the name of each step as it begins.
        opened: the checkpoint, where it is no file but a live model.

    Raises:
        UsageError: the request or one of its files cannot be used, or the model cannot stream.
        ExportFailed: a graph could not be made.
        CheckFailed: a check found a fault; nothing was written.
    """
    return run(CheckpointJob(request, opened) if request.mode == "full" else StepsJob(request), progress)
