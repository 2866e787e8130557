"""Small charts as inline SVG: bars, intervals, histograms and lines that follow the page's colours.

Texts are escaped. Charts of errors are in `svg/errors.py`, those of windows in `svg/window.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..figures import digits
from . import drawing as draw
from .drawing import COLOURS, LEFT, LINE, WIDTH, Axis, Frame, ticks

__all__ = ["COLOURS", "WIDTH", "Bar", "Series", "bars", "histogram", "intervals", "lines", "ticks"]


@dataclass(frozen=True)
class Bar:
    """A bar with its value and, for an interval or a tail, where a thin line goes from and to."""

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


def bars(items: Sequence[Bar], title: str, unit: str, *, colour: int | None = None) -> Markup:
    """Horizontal bars from 0, each under its label; `text` or the value stands at its end.

    Each has its own colour, or all the same one where they are parts of one thing.
    """
    top = max((max(item.value, item.high or 0.0) for item in items), default=0.0) or 1.0
    room = WIDTH - 2
    parts = []
    for index, item in enumerate(items):
        y = index * 44
        text, shade = item.text or digits(item.value, unit), (index if colour is None else colour) % COLOURS
        parts.append(draw.text(0, y + 13, draw.cut(item.label, 36), "label"))
        parts.append(draw.text(room, y + 13, text, "value", "end"))
        parts.append(draw.rect(0, y + 20, room * item.value / top, 14, f"c{shade}", f"{item.label}: {text}"))
        if item.low is not None and item.high is not None:
            parts.append(draw.whisker(room * item.low / top, room * item.high / top, y + 27))
    return draw.svg(parts, len(items) * 44, title)


def intervals(items: Sequence[Bar], title: str, reference: float = 1.0) -> Markup:
    """Values with their intervals beside a line at `reference`, on a logarithmic axis."""
    ends = [reference, *(e for i in items for e in (i.value, i.low, i.high) if e is not None and e > 0)]
    low, high = math.log(min(ends) / 1.1), math.log(max(ends) * 1.1)

    def x(value: float) -> float:
        return 10 + (WIDTH - 20) * (math.log(value) - low) / (high - low)

    height = len(items) * 40
    parts = [draw.path(f"M{x(reference):.1f} 0V{height + 6}", "reference")]
    for index, item in enumerate(items):
        y = index * 40
        parts.append(draw.text(0, y + 13, draw.cut(item.label, 36), "label"))
        parts.append(draw.text(WIDTH - 2, y + 13, item.text or digits(item.value), "value", "end"))
        if item.low is not None and item.high is not None:
            parts.append(draw.whisker(x(item.low), x(item.high), y + 26))
        parts.append(draw.dot(x(item.value), y + 26, 5, f"c{(index + 1) % COLOURS}", item.label))
    wanted = [m for m in (0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10, 20, 50, 100) if low <= math.log(m) <= high]
    parts += [draw.text(x(mark), height + 20, f"{mark:g}×", "tick", "middle") for mark in wanted]
    return draw.svg(parts, height + 26, title)


def histogram(edges: Sequence[float], counts: Sequence[int], title: str, x_label: str, colour: int = 0) -> Markup:
    """How many values lie between each two edges; the edges rise."""
    low, high, most = edges[0], edges[-1], max(counts, default=0) or 1
    frame = Frame(Axis(x_label, low, high if high > low else low + 1), Axis("calls", 0.0, float(most)))
    parts = frame.axes()
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        x0, x1 = frame.x(left), frame.x(right)
        width = max(0.5, x1 - x0 - 0.7)
        told = f"{digits(left)} to {digits(right)}: {count}"
        parts.append(draw.rect(x0, frame.y(count), width, frame.y(0) - frame.y(count), f"c{colour % COLOURS}", told))
    return draw.svg(parts, frame.height, title)


def lines(series: Sequence[Series], title: str, x_label: str, y_label: str, *, from_zero: bool = True) -> Markup:
    """Lines over a common axis, with a legend above them where there are several."""
    xs = [x for line in series for x, _ in line.points] or [0.0]
    ys = [y for line in series for _, y in line.points] or [0.0]
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    named = len(series) > 1
    across = Axis(x_label, min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1)
    frame = Frame(across, Axis(y_label, low, high if high > low else low + 1), legend=len(series) if named else 0)
    parts = frame.axes()
    for index, line in enumerate(series):
        colour = index % COLOURS
        corners = [f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in line.points]
        parts.append(draw.path("M" + "L".join(corners), f"line s{colour}"))
        for corner in corners:
            x, y = map(float, corner.split())
            parts.append(draw.dot(x, y, 2.4, f"c{colour}"))
        if named:
            parts.append(draw.rect(LEFT, index * LINE + 4, 14, 8, f"c{colour}"))
            parts.append(draw.text(LEFT + 20, index * LINE + 13, draw.cut(line.name, 40), "label"))
    return draw.svg(parts, frame.height, title)
