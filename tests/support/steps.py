"""Step files, exported by one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from localattn.exporter.export import ExportReport, ExportRequest, export


def export_steps(
    request: ExportRequest, mode: Literal["step", "prefill"] = "step", chunk: int | None = None
) -> list[ExportReport]:
    """Export a request as step files; the report on the requested file comes first, then that on its prefill file."""
    report = export(replace(request, mode=mode, chunk=chunk))
    return [report] if report.prefill is None else [report, report.prefill]
