"""Draw the pictures of a model's windows."""

from __future__ import annotations

from ..core.documents.window_view import WindowView
from .model_sections import example_text
from .page import Chart
from .svg.window import chosen_query, reach_picture, shown, single_positions, window_picture


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
