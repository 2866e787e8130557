"""Draw small charts as inline SVG: bars, intervals, histograms and lines in the page's colours.

Texts are escaped. Charts of errors are in `svg/errors.py`, those of windows in `svg/window.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..figures import digits
from . import drawing as draw
from .drawing import COLOURS, LEFT, LINE, WIDTH, Axis, Frame, ticks

__all__ = ["COLOURS", "WIDTH", "Bar", "Series", "bars", "histogram", "intervals", "lines", "ticks"]


# Characters of a label's line, beside the value or in a legend.
_LABEL = 36


@dataclass(frozen=True)
class Bar:
    """A bar with its value and, for an interval or a tail, the ends of a thin line."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Series:
    """A line of a chart: points by rising x."""

    name: str
    points: tuple[tuple[float, float], ...]


def bars(items: Sequence[Bar], title: str, unit: str, *, colour: int | None = None) -> draw.Markup:
    """Draw horizontal bars from 0, each under its label, with `text` or the value at its end.

    Each has its own colour; with `colour` all have that one, as parts of one thing.
    """
    top = max((max(item.value, item.high or 0.0) for item in items), default=0.0) or 1.0
    room = WIDTH - 2
    parts: list[draw.Markup] = []
    y = 0.0
    for index, item in enumerate(items):
        text, shade = item.text or digits(item.value, unit), (index if colour is None else colour) % COLOURS
        named, y = _named(item.label, text, y)
        parts += named
        parts.append(draw.rect(0, y + 20, room * item.value / top, 14, f"c{shade}", f"{item.label}: {text}"))
        if item.low is not None and item.high is not None:
            parts.append(draw.whisker(room * item.low / top, room * item.high / top, y + 27))
        y += 44
    return draw.svg(parts, y, title)


def _named(label: str, value: str, y: float) -> tuple[list[draw.Markup], float]:
    """Draw a value, and its label's lines next to it, below a height; return them and the height of the last line."""
    lines = draw.broken(label, _LABEL)
    parts = [draw.text(0, y + 13 + n * LINE, line, "label") for n, line in enumerate(lines)]
    return [draw.text(WIDTH - 2, y + 13, value, "value", "end"), *parts], y + LINE * (len(lines) - 1)


def intervals(items: Sequence[Bar], title: str) -> draw.Markup:
    """Draw values with their intervals beside a line at 1, on a logarithmic axis."""
    ends = [1.0, *(e for i in items for e in (i.value, i.low, i.high) if e is not None and e > 0)]
    low, high = math.log(min(ends) / 1.1), math.log(max(ends) * 1.1)

    def x(value: float) -> float:
        return 10 + (WIDTH - 20) * (math.log(value) - low) / (high - low)

    parts: list[draw.Markup] = []
    y = 0.0
    for index, item in enumerate(items):
        named, y = _named(item.label, item.text or digits(item.value), y)
        parts += named
        if item.low is not None and item.high is not None:
            parts.append(draw.whisker(x(item.low), x(item.high), y + 26))
        parts.append(draw.dot(x(item.value), y + 26, 5, f"c{(index + 1) % COLOURS}", item.label))
        y += 40
    height = y
    parts.insert(0, draw.path(f"M{x(1):.1f} 0V{height + 6:.0f}", "reference"))
    wanted = [m for m in (0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10, 20, 50, 100) if low <= math.log(m) <= high]
    parts += [draw.text(x(mark), height + 20, f"{mark:g}×", "tick", "middle") for mark in wanted]
    return draw.svg(parts, height + 26, title)


def histogram(edges: Sequence[float], counts: Sequence[int], title: str, x_label: str, colour: int = 0) -> draw.Markup:
    """Draw how many values lie between each two edges; the edges rise."""
    low, high, most = edges[0], edges[-1], max(counts, default=0) or 1
    frame = Frame(Axis(x_label, low, high if high > low else low + 1), Axis("calls", 0.0, float(most)))
    parts = frame.axes()
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        x, y, tooltip = frame.x(left), frame.y(count), f"{digits(left)} to {digits(right)}: {count}"
        parts.append(draw.rect(x, y, frame.x(right) - x - 0.7, frame.y(0) - y, f"c{colour % COLOURS}", tooltip))
    return draw.svg(parts, frame.height, title)


def lines(series: Sequence[Series], title: str, x_label: str, y_label: str) -> draw.Markup:
    """Draw lines over a common axis from 0, with a legend above them where there are several."""
    xs = [x for line in series for x, _ in line.points] or [0.0]
    ys = [y for line in series for _, y in line.points] or [0.0]
    across = Axis(x_label, min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1)
    legend = [(index, row) for index, line in enumerate(series) for row in draw.broken(line.name, _LABEL)]
    legend = legend if len(series) > 1 else []
    frame = Frame(across, Axis(y_label, 0.0, max(0.0, *ys) or 1.0), legend=len(legend))
    parts = frame.axes()
    for index, line in enumerate(series):
        colour = index % COLOURS
        corners = [(frame.x(x), frame.y(y)) for x, y in line.points]
        parts.append(draw.line(corners, f"line s{colour}"))
        parts += [draw.dot(x, y, 2.4, f"c{colour}") for x, y in corners]
    for place, (index, row) in enumerate(legend):
        if place == 0 or legend[place - 1][0] != index:
            parts.append(draw.rect(LEFT, place * LINE + 4, 14, 8, f"c{index % COLOURS}"))
        parts.append(draw.text(LEFT + 20, place * LINE + 13, row, "label"))
    return draw.svg(parts, frame.height, title)
