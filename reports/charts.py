"""Make the charts of a command's page, by the heading they belong to: they need markupsafe, which Markdown does not."""

from __future__ import annotations

from ..core.documents.error_spread import ErrorSpread
from ..core.documents.window_view import WindowView
from .bisect_page import BOUNDARIES, boundary_name
from .model_sections import Document, example_text, windows_of
from .page import Chart
from .parity_page import errors_title, files_of
from .svg.bars import Bar, bars
from .svg.errors import Step, error_histogram, error_positions, error_steps
from .svg.window import chosen_query, reach_picture, shown, single_positions, window_picture

_MOST_OPERATORS = 8


def bisect_charts(document: Document) -> dict[str, tuple[Chart, ...]]:
    """Draw the relative error along the graph."""
    rows, fault = document["boundaries"], document["fault"]
    steps = [Step(boundary_name(row), float(row["relative_rms"]), row["passed"]) for row in rows]
    marked = None if fault is None else next((n for n, row in enumerate(rows) if row == fault["boundary"]), None)
    caption = (
        "The error's root mean square at each boundary, relative to that of the values, in the order of the graph. "
        "Red: out of tolerance. NaN and Inf are left out of it."
    )
    return {BOUNDARIES: (Chart(error_steps(steps, marked), caption),)}


def inspect_charts(document: Document) -> dict[str, tuple[Chart, ...]]:
    """Draw the windows and, for an exported file, its most frequent operators."""
    charts = {title: window_charts(view) for title, view in windows_of(document).items()}
    if document.get("nodes"):
        counts = sorted(document["nodes"].items(), key=lambda item: (-item[1], item[0]))[:_MOST_OPERATORS]
        drawn = [Bar(name, count, text=f"{count:,}") for name, count in counts]
        charts["Graph"] = (Chart(bars(drawn, "Operators", "nodes", colour=0), "The commonest operators."),)
    return charts


def parity_charts(document: Document) -> dict[str, tuple[Chart, ...]]:
    """Draw histograms, errors along the sequence, and pictures of the windows."""
    charts = {}
    for before, file in files_of(document):
        views = windows_of(file)
        # The edges of windows show where an error begins or returns; AFT-local has no such edges.
        window = next((view.geometry.window_size for view in views.values() if not view.biases), None)
        for name, saved in file["errors"].items():
            spread = ErrorSpread.from_dict(saved)
            charts[errors_title(name, before)] = _errors(spread, file["tolerance"]["atol"], window)
        charts |= {before + title: window_charts(view) for title, view in views.items()}
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


def window_charts(view: WindowView) -> tuple[Chart, ...]:
    """Draw which keys queries see, and how far the last (or the middle) one sees through the layers."""
    pointed = example_text(view.example(chosen_query(view)))
    charts = [Chart(window_picture(view), f"{_filled(view)} ({_part(view)}). Pointed out: {pointed}.")]
    if view.depth > 1 and not view.biases:
        query = view.sequence - 1 if view.geometry.causal else view.sequence // 2
        charts.append(Chart(reach_picture(view, query), f"Inputs that query {query:,} sees through the layers."))
    return tuple(charts)


def _filled(view: WindowView) -> str:
    if not view.biases:
        return "Filled: a visible key"
    others = "the earlier ones" if view.geometry.causal else "the others"
    return f"Filled: a key with a learned bias; {others} count too, with bias 0"


def _part(view: WindowView) -> str:
    size = shown(view)
    part = f"{size:,} positions"
    if view.length and size < view.length:
        part = f"the first {size:,} of {view.length:,} positions"
    return part if single_positions(view) or view.biases else f"{part}; lines at the windows' edges"


CHARTS = {
    "parity": parity_charts,
    "bisect": bisect_charts,
    **dict.fromkeys(("onnx", "engine", "checkpoint"), inspect_charts),
}
