"""Two panels over a length: what every candidate takes in time and in memory, lines labelled at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

INK, QUIET = "#1f2328", "#6e7781"
OURS, OURS_TOO = "#0a5fd1", "#5ba2f0"


@dataclass(frozen=True)
class Look:
    """What a figure shows.

    Args:
        ours: the candidates whose lines are drawn thick.
        colors: by candidate, in the order they are drawn; hues that stay apart in print and for colour-blind readers.
        panels: of the time and of the memory: the figure's name in a result, title, unit.
        axis: what the lengths are.
        title: of the whole.
    """

    ours: tuple[str, ...]
    colors: dict[str, str]
    panels: tuple[tuple[str, str, str], tuple[str, str, str]]
    axis: str
    title: str


def draw_panels(
    result: dict[str, Any], look: Look, path: Path, *, limit: tuple[str, Sequence[float]] | None, subtitle: str
) -> Path:
    """Draw a result's sizes; returns the file.

    Args:
        result: as `machine.read_result` gives it, with `sizes` and `labels`.
        look: what to show of it.
        path: the image.
        limit: label and values of the dotted line in the panel of the time; None without.
        subtitle: setting and machine.
    """
    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(12.5, 5.4), facecolor="white")
    lengths = [size["length"] for size in result["sizes"]]
    for axes, panel in zip((time, memory), look.panels, strict=True):
        _panel(axes, result, look, *panel)
    ends = [_ends(result, look, figure_name) for figure_name, *_ in look.panels]
    if limit is not None:
        label, values = limit
        time.plot(lengths, values, color=QUIET, linestyle=(0, (2, 2)), linewidth=1.4, zorder=1)
        ends[0].append((lengths[-1], values[-1], label, QUIET, False))
    for axes, lines in zip((time, memory), ends, strict=True):
        label_lines(axes, lines)
    figure.suptitle(look.title, x=0.012, ha="left", fontsize=15, fontweight="bold", color=INK)
    figure.text(0.012, 0.905, subtitle, fontsize=10, color=QUIET)
    figure.subplots_adjust(left=0.055, right=0.86, top=0.82, bottom=0.1, wspace=0.66)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return path


def _points(result: dict[str, Any], name: str, figure: str) -> tuple[list[int], list[float]]:
    """Lengths and values of a candidate where it was measured."""
    measured = [size for size in result["sizes"] if figure in size["candidates"].get(name, {})]
    return [s["length"] for s in measured], [s["candidates"][name][figure] for s in measured]


def _panel(axes: Axes, result: dict[str, Any], look: Look, figure: str, title: str, unit: str) -> None:
    for name, color in look.colors.items():
        lengths, values = _points(result, name, figure)
        ours = name in look.ours
        axes.plot(
            lengths,
            values,
            color=color,
            linewidth=3.2 if ours else 1.7,
            marker="o",
            markersize=6.5 if ours else 4,
            zorder=3 if ours else 2,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([size["length"] for size in result["sizes"]])
    low, high = axes.get_ylim()
    if high < 100 * low:  # powers of ten alone would be one tick or two
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plain = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(plain)
        axis.set_minor_locator(NullLocator())
    axes.set_title(f"{title} [{unit}]", loc="left", fontsize=11.5, color=INK)
    axes.set_xlabel(look.axis, color=QUIET)
    quiet_frame(axes)


def quiet_frame(axes: Axes) -> None:
    """Leave of a panel's frame the bottom line and faint lines across."""
    axes.grid(axis="y", color="#d8dee4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#d8dee4")


_End = tuple[int, float, str, str, bool]


def _ends(result: dict[str, Any], look: Look, figure: str) -> list[_End]:
    """Last point, label and colour of every line; whether it is ours."""
    ends = []
    for name, color in look.colors.items():
        lengths, values = _points(result, name, figure)
        if lengths:
            ends.append((lengths[-1], values[-1], result["labels"][name], color, name in look.ours))
    return ends


def label_lines(axes: Axes, ends: list[_End], *, last: float | None = None, size: float = 10) -> None:
    """Write each label in the right margin, at its line's end, moved apart where they would touch.

    Args:
        axes: the panel, its scales as they stay.
        ends: the lines.
        last: where the margin begins; by default the longest line's end.
        size: of the letters, in points.
    """
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    if last is None:
        last = max(length for length, *_ in ends)
    place = axes.transData
    heights = [place.transform((length, value))[1] for length, value, *_ in ends]
    order = sorted(range(len(ends)), key=lambda index: heights[index])
    step = 1.5 * size * axes.figure.dpi / 72
    shifted = dict(zip(order, _spread([heights[index] for index in order], step), strict=True))
    for index, (length, value, label, color, ours) in enumerate(ends):
        y = place.inverted().transform((0, shifted[index]))[1]
        if length < last:
            axes.plot([length, last * 1.08], [value, y], color=color, linewidth=0.8, linestyle=":", clip_on=False)
        axes.annotate(
            label,
            (last, y),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=size,
            fontweight="bold" if ours else "normal",
            annotation_clip=False,
        )


def _spread(heights: list[float], step: float) -> list[float]:
    """Ascending heights, moved as little as needed to stand `step` apart."""
    groups = [[height] for height in heights]
    centers = list(heights)
    index = 0
    while index + 1 < len(groups):
        reach = step * (len(groups[index]) + len(groups[index + 1])) / 2
        if centers[index + 1] - centers[index] < reach:
            groups[index] += groups.pop(index + 1)
            centers.pop(index + 1)
            centers[index] = sum(groups[index]) / len(groups[index])
            index = max(0, index - 1)
        else:
            index += 1
    spread = []
    for group, center in zip(groups, centers, strict=True):
        spread += [center + step * (place - (len(group) - 1) / 2) for place in range(len(group))]
    return spread
