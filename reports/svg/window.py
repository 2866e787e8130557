"""Draw a window: which keys each query sees, and how far one query sees through all layers."""

from __future__ import annotations

import math

import numpy as np

from ...core.documents.window_view import WindowView
from . import drawing as draw
from .drawing import WIDTH

_LEFT, _TOP, _SIDE = 54, 8, 306
# Rows of a picture that does not show single queries.
_MOST_ROWS = 204
_MOST_BARS = 8
_MOST_CELLS = 24


def shown(view: WindowView) -> int:
    """Return how many positions the picture shows, from the first on."""
    return min(view.sequence, max(view.pattern, 8))


def single_positions(view: WindowView) -> bool:
    """Check whether the picture is small enough for a grid around every pair."""
    return shown(view) <= _MOST_CELLS


def chosen_query(view: WindowView) -> int:
    """Return the query to highlight: in the middle of the first window with all its windows to see."""
    geometry = view.geometry
    if view.biases:
        return min(shown(view) - 1, view.pattern // 2)
    return min(shown(view) - 1, (geometry.look_backward * geometry.window_size) + geometry.window_size // 2)


def window_picture(view: WindowView) -> draw.Markup:
    """Draw queries downward and keys to the right: visible pairs are filled, one query's keys stand out."""
    size = shown(view)
    unit = _SIDE / size
    parts = [draw.rect(_LEFT, _TOP, _SIDE, _SIDE, "hidden")]
    parts.append(draw.path(_filled(view, size, unit), "seen"))
    parts.append(_grid(view, size, unit))
    query = chosen_query(view)
    example = view.example(query)
    height = max(unit, 3.0)
    y = _TOP + (query + 0.5) * unit
    end = min(example.end, size)
    tooltip = f"query {query} sees keys {example.first} to {example.end - 1}"
    width = (end - example.first) * unit
    parts.append(draw.rect(_LEFT + example.first * unit, y - height / 2, width, height, "c1", tooltip))
    parts.append(draw.dot(_LEFT + (query + 0.5) * unit, y, max(2.6, unit / 4), "mark", f"query {query} itself"))
    for value, label in _marks(view, size):
        place = value * unit + (unit / 2 if single_positions(view) else 0)
        parts.append(draw.text(_LEFT + place, _TOP + _SIDE + 16, label, "tick", "middle"))
        parts.append(draw.text(_LEFT - 6, _TOP + place + 4, label, "tick", "end"))
    parts.append(draw.text(_LEFT + _SIDE / 2, _TOP + _SIDE + 36, "key position", "axis-label", "middle"))
    parts.append(draw.upright(12, _TOP + _SIDE / 2, "query position"))
    return draw.svg(parts, _TOP + _SIDE + 42, f"Which keys a query sees: {view.describe()}")


def reach_picture(view: WindowView, query: int) -> draw.Markup:
    """Draw a bar for each depth: the inputs that this query sees through so many layers."""
    deepest = view.depth
    depths = sorted({round(1 + i * (deepest - 1) / (_MOST_BARS - 1)) for i in range(_MOST_BARS)})
    reached = [(depth, view.geometry.receptive_interval(query, view.sequence, depth)) for depth in depths]
    low, high = reached[-1][1]
    left, right = 4, WIDTH - 10
    unit = (right - left) / max(high - low, 1)
    middle = left + (query + 0.5 - low) * unit
    parts = []
    for index, (depth, (first, end)) in enumerate(reached):
        y = index * 40
        layers = "1 layer" if depth == 1 else f"{depth} layers"
        inputs = f"{first:,} to {end - 1:,}"
        parts.append(draw.text(left, y + 14, layers, "label"))
        parts.append(draw.text(right, y + 14, inputs, "value", "end"))
        start, width = left + (first - low) * unit, (end - first) * unit
        parts.append(draw.rect(start, y + 20, width, 12, "c0", f"{layers}: {inputs}"))
        parts.append(draw.rect(middle - 1.5, y + 18, 3, 16, "mark"))
    height = len(reached) * 40
    anchor = "end" if middle > 2 * WIDTH / 3 else "middle" if middle > WIDTH / 3 else "start"
    parts.append(draw.text(middle, height + 13, f"query {query:,}", "tick", anchor))
    return draw.svg(parts, height + 18, f"What query {query} sees through the layers")


def _filled(view: WindowView, size: int, unit: float) -> str:
    """Return the visible pairs as one path; rows that see the same keys are one rectangle."""
    queries = np.unique(np.linspace(0, size - 1, min(size, _MOST_ROWS)).astype(np.int64))
    firsts, ends = view.geometry.visible_interval(queries, view.sequence)
    others = np.flatnonzero((np.diff(firsts) != 0) | (np.diff(ends) != 0)) + 1  # rows that see other keys
    path = []
    for row, top, bottom in zip([0, *others], [0, *queries[others]], [*queries[others], size], strict=True):
        first, end = _LEFT + firsts[row] * unit, _LEFT + min(ends[row], size) * unit
        path.append(f"M{first:.1f} {_TOP + top * unit:.1f}H{end:.1f}V{_TOP + bottom * unit:.1f}H{first:.1f}Z")
    return "".join(path)


def _grid(view: WindowView, size: int, unit: float) -> draw.Markup:
    """Draw lines at the windows' edges, or around every pair where there are few."""
    step = 1 if single_positions(view) else view.geometry.window_size
    edges = range(0, size + 1, step) if size / step <= 48 else range(0)
    lines = "".join(
        f"M{_LEFT} {_TOP + e * unit:.1f}H{_LEFT + _SIDE}M{_LEFT + e * unit:.1f} {_TOP}V{_TOP + _SIDE}" for e in edges
    )
    return draw.path(lines, "edge")


def _marks(view: WindowView, size: int) -> list[tuple[float, str]]:
    """Return ticks at the windows' edges, or at round numbers where windows are single positions."""
    if single_positions(view):
        step = math.ceil(size / 12)
        return [(value, str(value)) for value in range(0, size, step)]
    window = view.geometry.window_size
    if window == 1:
        return [(value, draw.number(value)) for value in draw.ticks(0, size)]
    step = window * math.ceil(size / window / 6)
    return [(value, f"{value:,}") for value in range(0, size + 1, step)]
