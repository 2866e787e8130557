"""Print the results of `localattn export --mode step|prefill`: files that run a model a few tokens at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from .console import bytes_text, export_document, print_checks, print_json, print_notes, print_warnings, say

if TYPE_CHECKING:
    from ...exporter.export_report import ExportReport
    from ...exporter.options import ExportRequest


def print_step_files(report: ExportReport, *, as_json: bool) -> None:
    """Print what was written."""
    prefill = report.prefill
    if as_json:
        second = None if prefill is None else export_document(prefill)
        # `companion` is the name of older releases, kept for one more.
        print_json({**export_document(replace(report, prefill=None)), "prefill": second, "companion": second})
        return
    print_notes(report.notes)
    for written in (report, *([] if prefill is None else [prefill])):
        _print_file(written)
    print_warnings(report)


def _print_file(report: ExportReport) -> None:
    import numpy as np

    step, sidecar = report.sidecar.step, report.sidecar
    assert step is not None
    say(f"{report.path}  {sidecar.title}, {sidecar.dtype}, opset {sidecar.opset}, {step.chunk} token(s) a call")
    held = {name for cache in step.caches for name in (cache.input, cache.output)}
    for kind, specs in (("input ", sidecar.inputs), ("output", sidecar.outputs)):
        for spec in specs:
            if spec.name not in held:
                say(f"  {kind}  {spec.describe()}")
    sizes = [math.prod(cache.shape) * np.dtype(cache.dtype).itemsize for cache in step.caches]
    say(f"  caches  {len(sizes)} of {bytes_text(sum(sizes))} in all, as outputs next_…")
    end = "without end" if step.max_positions is None else f"{step.max_positions:,} positions, an error past them"
    say(f"  runs    {end}")
    if sidecar.external_data is not None:
        size = report.path.with_name(sidecar.external_data).stat().st_size
        say(f"  data    {sidecar.external_data}, {bytes_text(size)}")
    say("Checks:")
    print_checks(sidecar.checks)


def print_step_plan(request: ExportRequest) -> None:
    """Print what would be written."""
    from ...exporter.jobs.steps import open_steps

    opened, files = open_steps(request)
    print_notes(opened.notes)
    for path, source in files.items():
        say(f"Would export {source.source.title} to {path}, {source.chunk} token(s) a call:")
        for spec in source.inputs(request.dtype):
            say(f"  input   {spec.describe()}")
        say(f"  output  {', '.join(source.output_names())}")
