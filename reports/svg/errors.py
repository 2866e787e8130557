"""Draw charts of errors: by size, along the sequence, and from module to module, with logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...core.documents.error_spread import ErrorSpread
from ..figures import figure
from . import drawing as draw
from .drawing import LINE, PLOT, WIDTH, Axis, Frame

# More window edges than this would be a grey area.
_MOST_EDGES = 40
# Values of 0 lie this many powers of ten below the least other value, at the end of the axis.
_BELOW = 1
_TOLERANCE = "tolerance at 0"


def error_histogram(spread: ErrorSpread, atol: float) -> draw.Markup:
    """Draw how many elements have errors of which size, both logarithmic; errors of exactly 0 at the left."""
    bins = list(spread.bins())
    ends = [edge for low, high, _ in bins for edge in (low, high)] + _near(atol, [low for low, _, _ in bins])
    low, high = _powers(ends)
    room = 0.45 if spread.zero else 0.0  # powers of ten beside the axis for the bar of zeros
    most = max([count for _, _, count in bins] + [spread.zero, 10])
    # From half an element on, so that a single one has a bar.
    upward = Axis("elements", math.log10(0.5), math.log10(most), powers=True)
    frame = Frame(Axis("error", low - room, high, powers=True), upward, legend=1)
    parts = frame.axes()
    floor = frame.y(math.log10(0.5))
    for left, right, count in bins:
        if count:
            x, y = frame.x(left), frame.y(math.log10(count))
            shown = f"{figure(10**left)} to {figure(10**right)}: {count:,}"
            parts.append(draw.rect(x, y, frame.x(right) - x - 0.7, floor - y, "c0", shown))
    if spread.zero:
        x, y = frame.x(low - room), frame.y(math.log10(spread.zero))
        parts.append(draw.rect(x, y, frame.x(low - 0.15) - x, floor - y, "c3", f"no error: {spread.zero:,}"))
        parts.append(draw.text(x, floor + 16, "0", "tick"))
    if atol > 0 and low <= math.log10(atol) <= high:
        x = frame.x(math.log10(atol))
        parts.append(draw.path(f"M{x:.1f} {frame.top - 10}V{floor:.1f}", "reference"))
        left = x < WIDTH / 2
        parts.append(draw.text(x + (5 if left else -5), frame.top - 5, _TOLERANCE, "tick", "start" if left else "end"))
    return draw.svg(parts, frame.height, "Errors by size")


def error_positions(spread: ErrorSpread, atol: float, window: int | None) -> draw.Markup:
    """Draw the largest error at each position of the sequence; positions out of tolerance are marked.

    Thin lines mark the edges of the windows, where they are few enough to be seen.
    """
    logs = _logs(spread.largest)
    low, high = _powers([*logs, *_near(atol, logs)], room_for_zero=0 in spread.largest)
    first, last = spread.positions[0], spread.positions[-1] + spread.width
    frame = Frame(
        Axis("position in the sequence", first, max(last, first + 1)), Axis("largest error", low, high, True), 1
    )
    parts = frame.axes()
    if window is not None and last // window <= _MOST_EDGES:
        edges = "".join(
            f"M{frame.x(edge):.1f} {frame.top}V{frame.top + PLOT}"
            for edge in range(math.ceil((first + 1) / window) * window, last, window)
        )
        if edges:
            parts.append(draw.path(edges, "edge"))
    if atol > 0 and low <= math.log10(atol) <= high:
        parts += frame.line_across(math.log10(atol), _TOLERANCE)
    middle = (spread.width - 1) / 2
    points = [
        (frame.x(position + middle), frame.y(_log(value, low)))
        for position, value in zip(spread.positions, spread.largest, strict=True)
    ]
    parts += [draw.line(run, "line s0") for run in _runs(spread, points)]
    for (x, y), position, value, count in zip(points, spread.positions, spread.largest, spread.beyond, strict=True):
        shown = f"{_stretch(position, spread.width)}: {figure(value)}" + (f", {count:,} out of tolerance" * bool(count))
        parts.append(draw.dot(x, y, 3.2 if count else 1.4, "bad" if count else "c0", shown))
    return draw.svg(parts, frame.height, "Largest error by position")


@dataclass(frozen=True)
class Step:
    """One boundary between modules: its error relative to its own size (inf where it is not finite)."""

    label: str
    error: float
    passed: bool


def error_steps(steps: Sequence[Step], fault: int | None) -> draw.Markup:
    """Draw the relative error at each module boundary, in the order of the graph.

    `fault` is the index of the first fault.
    """
    errors = [step.error for step in steps]
    low, high = _powers(_logs(errors), room_for_zero=0 in errors)
    across = Axis("module boundary, in order", 1, max(len(steps), 2))
    frame = Frame(across, Axis("relative error (rms)", low, high, powers=True), legend=int(fault is not None))
    parts = frame.axes()
    points = [(frame.x(n), frame.y(_log(step.error, low))) for n, step in enumerate(steps, 1)]
    parts.append(draw.line(points, "line s0"))
    for n, (step, (x, y)) in enumerate(zip(steps, points, strict=True), 1):
        shown = f"{n}: {step.label}: {figure(step.error)}"
        parts.append(draw.dot(x, y, 2 if step.passed else 3.2, "c0" if step.passed else "bad", shown))
    if fault is not None:
        x, y = points[fault]
        anchor = "start" if x < WIDTH / 3 else "end" if x > 2 * WIDTH / 3 else "middle"
        parts.append(draw.path(f"M{x:.1f} {LINE:.1f}V{frame.top + PLOT}", "fault"))
        parts.append(draw.text(x, LINE - 5, f"first fault: {draw.cut(steps[fault].label, 34)}", "label", anchor))
    return draw.svg(parts, frame.height, "Relative error from module to module")


def _runs(spread: ErrorSpread, points: Sequence[tuple[float, float]]) -> list[Sequence[tuple[float, float]]]:
    """Break the line where positions were left out."""
    pairs = enumerate(pairwise(spread.positions), 1)
    breaks = [index for index, (before, at) in pairs if at - before > spread.width]
    return [points[start:end] for start, end in pairwise([0, *breaks, len(points)])]


def _stretch(position: int, width: int) -> str:
    return f"position {position}" if width == 1 else f"positions {position} to {position + width - 1}"


def _logs(values: Iterable[float]) -> list[float]:
    return [math.log10(value) for value in values if 0 < value < math.inf]


def _log(value: float, zero: float) -> float:
    """Return a value as a power of ten; 0 becomes the lower end, infinity stays infinite."""
    return zero if value <= 0 else math.log10(value) if value < math.inf else math.inf


def _near(atol: float, others: Sequence[float]) -> list[float]:
    """Return the tolerance's power of ten in a list, where it is near enough to the errors to be shown."""
    if atol <= 0:
        return []
    return [math.log10(atol)] if not others or abs(math.log10(atol) - max(others)) < 4 else []


def _powers(logs: Sequence[float], room_for_zero: bool = False) -> tuple[int, int]:
    """Return the whole powers of ten around these; with zeros, there is room for them at the lower end."""
    if not logs:
        return -1, 0
    low = math.floor(min(logs) + 1e-9) - (_BELOW if room_for_zero else 0)
    return low, max(math.ceil(max(logs) - 1e-9), low + 1)
