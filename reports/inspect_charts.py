"""Make the charts of `inspect`'s page, by the heading they belong to."""

from __future__ import annotations

from .model_sections import Document, window_titles, windows_of
from .page import Chart
from .svg.bars import Bar, bars
from .window_charts import window_charts

_MOST_OPERATORS = 8


def inspect_charts(document: Document) -> dict[str, tuple[Chart, ...]]:
    """Draw the windows and, for an exported file, its most frequent operators."""
    views = windows_of(document)
    charts = {title: window_charts(view) for title, view in zip(window_titles(views), views, strict=True)}
    if document.get("nodes"):
        counts = sorted(document["nodes"].items(), key=lambda item: (-item[1], item[0]))[:_MOST_OPERATORS]
        drawn = [Bar(name, count, text=f"{count:,}") for name, count in counts]
        charts["Graph"] = (Chart(bars(drawn, "Operators", "nodes", colour=0), "The commonest operators."),)
    return charts
