"""Draw what charts consist of: shapes, texts, axes and round numbers, as escaped SVG.

Drawings are `WIDTH` units wide and scale with the page, so that their text stays legible at 390 pixels. Colours are
classes that `page.css` defines, for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.spelling import spelled

if TYPE_CHECKING:
    from markupsafe import Markup as Markup

WIDTH = 380
# As many series as page.css has colours for; more could not be distinguished.
COLOURS = 6
LEFT, RIGHT, BOTTOM = 54, 14, 42
LINE, PLOT = 19, 160

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round numbers from `low` to `high`: 1, 2 or 5 times a power of ten apart."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True)
class Axis:
    """One axis: what it shows, and its range.

    Args:
        label: its label, with the unit.
        low: its lower end; on a logarithmic axis the power of ten.
        high: its upper end, above `low`.
        powers: whether it is logarithmic, and its values are exponents of ten.
    """

    label: str
    low: float
    high: float
    powers: bool = False

    def marks(self) -> list[tuple[float, str]]:
        """Return the positions of the ticks, and their texts."""
        if not self.powers:
            return [(value, number(value)) for value in ticks(self.low, self.high)]
        first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
        step = max(1, math.ceil((last - first) / 6))
        return [(value, power(value)) for value in range(last, first - 1, -step)]

    def share(self, value: float) -> float:
        """Return where a value lies on the axis, from 0 to 1; values outside are moved to its ends."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


class Frame:
    """The area of a chart: axes, grid, and the position of values."""

    def __init__(self, across: Axis, upward: Axis, legend: int = 0) -> None:
        self.top = 10 + legend * LINE
        self._across, self._upward = across, upward
        self.height = self.top + PLOT + BOTTOM

    def x(self, value: float) -> float:
        """Return where a value lies on the horizontal axis."""
        return LEFT + (WIDTH - LEFT - RIGHT) * self._across.share(value)

    def y(self, value: float) -> float:
        """Return where a value lies on the vertical axis."""
        return self.top + PLOT * (1 - self._upward.share(value))

    def axes(self) -> list[Markup]:
        """Draw grid, ticks and labels."""
        parts = []
        bottom = self.top + PLOT
        for value, shown in self._upward.marks():
            y = self.y(value)
            parts.append(path(f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}", "grid"))
            parts.append(text(LEFT - 6, y + 4, shown, "tick", "end"))
        for value, shown in self._across.marks():
            parts.append(text(self.x(value), bottom + 16, shown, "tick", "middle"))
        parts.append(path(f"M{LEFT} {bottom}H{WIDTH - RIGHT}", "axis"))
        parts.append(text((LEFT + WIDTH - RIGHT) / 2, self.height - 6, self._across.label, "axis-label", "middle"))
        parts.append(upright(12, self.top + PLOT / 2, self._upward.label))
        return parts

    def line_across(self, value: float, shown: str) -> list[Markup]:
        """Draw a dashed line at a height, with its text above its right end."""
        y = self.y(value)
        dashed = path(f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}", "reference")
        return [dashed, text(WIDTH - RIGHT, y - 5, shown, "tick", "end")]


def number(value: float) -> str:
    """Write a tick's number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def power(exponent: float) -> str:
    """Write a power of ten: `10⁻⁶`, and in plain digits from 1 to 100."""
    exponent = round(exponent)
    return str(10**exponent) if 0 <= exponent <= 2 else "10" + str(exponent).translate(_SUPERSCRIPTS)


def cut(label: str, most: int) -> str:
    """Shorten a long name in its middle: its beginning and end distinguish it from similar ones."""
    return label if len(label) <= most else f"{label[: most // 2 - 1]}…{label[-(most // 2) :]}"


def broken(label: str, most: int) -> list[str]:
    """Break a long name into lines of at most `most` characters, after a sign between words if possible."""
    lines = []
    while len(label) > most:
        end = 1 + max((label.rfind(sign, most // 2, most) for sign in " ,/._-"), default=-1) or most
        lines.append(label[:end].rstrip())
        label = label[end:].lstrip()
    return [*lines, label]


def svg(parts: Sequence[Markup], height: float, title: str) -> Markup:
    """Make the whole drawing; screen readers read `title` aloud."""
    form = '<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>'
    return _escaped(form, WIDTH, height, title, _escaped("").join(parts))


def text(x: float, y: float, shown: str, kind: str, anchor: str = "start") -> Markup:
    """Draw a text on its baseline."""
    return _escaped('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>', kind, x, y, anchor, shown)


def upright(x: float, y: float, shown: str) -> Markup:
    """Draw a label beside a vertical axis."""
    form = '<text class="axis-label" text-anchor="middle" transform="translate({} {:.1f}) rotate(-90)">{}</text>'
    return _escaped(form, x, y, shown)


def rect(x: float, y: float, width: float, height: float, kind: str, shown: str = "") -> Markup:
    """Draw a rectangle, at least half a unit wide; `shown` appears under the pointer."""
    form = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">{}</rect>'
    return _escaped(form, kind, x, y, max(width, 0.5), height, _title(shown))


def dot(x: float, y: float, radius: float, kind: str, shown: str = "") -> Markup:
    """Draw a filled circle; `shown` appears under the pointer."""
    form = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{}">{}</circle>'
    return _escaped(form, kind, x, y, radius, _title(shown))


def _title(shown: str) -> Markup:
    return _escaped("<title>{}</title>" if shown else "{}", shown)


def path(corners: str, kind: str) -> Markup:
    """Draw lines along an SVG path."""
    return _escaped('<path class="{}" d="{}"></path>', kind, corners)


def _escaped(form: str, *values: object) -> Markup:
    """Fill a form with values, texts among them spelled out and escaped."""
    from markupsafe import Markup  # pages in Markdown are made without it

    return Markup(form).format(*(spelled(value) if type(value) is str else value for value in values))


def line(points: Iterable[tuple[float, float]], kind: str) -> Markup:
    """Draw a line through points."""
    return path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), kind)


def whisker(low: float, high: float, y: float) -> Markup:
    """Draw a thin line with ends, for an interval."""
    return path(f"M{low:.1f} {y - 5}V{y + 5}M{low:.1f} {y}H{high:.1f}M{high:.1f} {y - 5}V{y + 5}", "whisker")
