"""Make the charts of a parity page, by the heading they belong to."""

from __future__ import annotations

from ..core.documents.error_spread import ErrorSpread
from .model_sections import Document, window_titles, windows_of
from .page import Chart
from .parity_page import errors_title, files_of, prefix
from .svg.errors import error_histogram, error_positions
from .window_charts import window_charts


def parity_charts(document: Document) -> dict[str, tuple[Chart, ...]]:
    """Draw histograms, errors along the sequence, and pictures of the windows."""
    charts = {}
    files = files_of(document)
    for file in files:
        before, views = prefix(file, files), windows_of(file)
        # The edges of windows show where an error begins or returns; AFT-local has no such edges.
        window = next((view.geometry.window_size for view in views if not view.biases), None)
        for name, saved in file["errors"].items():
            spread = ErrorSpread.from_dict(saved)
            charts[errors_title(name, before)] = _errors(spread, file["tolerance"]["atol"], window)
        charts |= {before + t: window_charts(view) for t, view in zip(window_titles(views), views, strict=True)}
    return charts


def _errors(spread: ErrorSpread, atol: float | None, window: int | None) -> tuple[Chart, ...]:
    at_zero = "No tolerance is for single elements here."
    if atol is not None:
        at_zero = f"The dashed line is the tolerance at a value of 0 ({atol:g}); larger values are allowed more."
    charts = [Chart(error_histogram(spread, atol or 0), f"Errors of all {spread.total:,} elements by size. {at_zero}")]
    if spread.positions:
        stretch = "" if spread.width == 1 else f" (a dot stands for {spread.width} positions)"
        edges = "" if window is None else f" Thin lines: edges of the windows of {window}, where there are few."
        caption = f"The largest error at each position{stretch}; red: out of tolerance.{edges}"
        charts.append(Chart(error_positions(spread, atol or 0, window), caption))
    return tuple(charts)
