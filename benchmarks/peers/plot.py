"""`peers.png`: small multiples, a row a window, a column a geometry; every line is a way to compute it.

The height is the time over the limit, so a line that stays flat is linear in the length. A hue stands for a kind of
peer and a dash for the one of its kind, so that nothing hangs on telling colours apart.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from ..limit.roofline import name_of_limit
from ..machine import read_result
from ..panels import INK, OURS, QUIET, label_lines, quiet_frame
from ..plot import IMAGES, machine
from .grid import EVERY_LENGTH, GEOMETRIES, WINDOWS, Cell, choose
from .run import Row, times
from .table import PEERS

FIGURE = IMAGES / "peers.png"
_UPSTREAM, _DENSE, _SPARSE = "#b45309", "#57606a", "#8b2fb8"
_SOLID, _DASHED, _DOTTED = "-", (0, (4, 1.6)), (0, (1.2, 1.3))
# By candidate: colour, dash, marker, label.
_STYLE: dict[str, tuple[str, object, str, str]] = {
    "upstream": (_UPSTREAM, _SOLID, "o", "local-attention, eager"),
    "upstream_compiled": (_UPSTREAM, _DASHED, "s", "… torch.compile"),
    "upstream_exported": (_UPSTREAM, _DOTTED, "^", "… exported as it is"),
    "dense": (_DENSE, _SOLID, "o", "dense SDPA exported"),
    "attention_op": (_DENSE, _DASHED, "s", "ONNX Attention, mask"),
    "gqa": (_SPARSE, _DOTTED, "^", "GroupQueryAttention"),
    "sdpa_blocks": (_SPARSE, _SOLID, "o", "torch SDPA over blocks"),
    "flex": (_SPARSE, _DASHED, "s", "FlexAttention"),
    "node": (OURS, _DASHED, "o", "localattn node"),
    "kernel": (OURS, _SOLID, "o", "localattn, compiled"),
}
_THICK = ("node", "kernel")


def latest() -> Row:
    """Return the newest result in which all cells of the plot were measured.

    Raises:
        FileNotFoundError: there is none.
    """
    wanted = {cell for cell in choose(()) if cell.dtype == "fp32" and not cell.masked}
    found = []
    for name in ("peers", "peers_partial"):
        with suppress(FileNotFoundError):
            found.append(read_result(name))
    whole = [result for result in found if wanted <= {Cell.of(row) for row in result["cells"]}]
    if not whole:
        raise FileNotFoundError("no result has every fp32 cell without a mask")
    return max(whole, key=lambda result: str(result["date"]))


def draw(result: Row, path: Path = FIGURE) -> Path:
    """Draw the fp32 cells without a mask; returns the file."""
    shown = [row for row in result["cells"] if row["dtype"] == "fp32" and not row["masked"]]
    windows = [window for window in WINDOWS if any(row["window"] == window for row in shown)]
    figure, panels = pyplot.subplots(
        len(windows),
        len(GEOMETRIES),
        figsize=(13.5, 1.5 + 3.3 * len(windows)),
        sharex=True,
        sharey=True,
        squeeze=False,
        facecolor="white",
    )
    ticks = [length for length in EVERY_LENGTH if any(row["length"] == length for row in shown)]
    for line, window in zip(panels, windows, strict=True):
        for axes, shape in zip(line, GEOMETRIES, strict=True):
            _panel(axes, [row for row in shown if row["window"] == window and row["shape"] == shape], ticks)
            axes.set_title(f"{shape}, window {window}", loc="left", fontsize=11, color=INK)
    panels[0][0].set_xlim(ticks[0] / 1.15, ticks[-1] * 1.15)
    for line in panels:
        for axes in line:
            _label(axes)
    for axes in panels[-1]:
        axes.set_xlabel("sequence length", color=QUIET)
    _frame(figure, result, len(windows))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
    return path


def _frame(figure: Figure, result: Row, rows: int) -> None:
    height = figure.get_figheight()
    setting = result["setting"]
    figure.suptitle(
        "Windowed attention on the CPU: time over the least possible",
        x=0.012,
        y=1 - 0.12 / height,
        ha="left",
        va="top",
        fontsize=15,
        fontweight="bold",
        color=INK,
    )
    limit = name_of_limit(result["cells"][0])
    subtitle = (
        f"fp32, no mask, {setting['heads']} heads of {setting['head_dim']}, {setting['threads']} threads, "
        f"{machine(result)}. 1 = {limit}. Lower is better; flat is linear in the length."
    )
    figure.text(0.012, 1 - 0.62 / height, subtitle, fontsize=10, color=QUIET)
    figure.subplots_adjust(left=0.035, right=0.88, top=1 - 1.1 / height, bottom=0.5 / height, wspace=0.76, hspace=0.2)


def _panel(axes: Axes, rows: list[Row], ticks: list[int]) -> None:
    for name, (color, dash, marker, _) in _STYLE.items():
        points = [(row["length"], times(row)[name] / row["limit_ms"]) for row in rows if name in times(row)]
        if points:
            thick = name in _THICK
            axes.plot(
                *zip(*points, strict=True),
                color=color,
                linestyle=dash,
                marker=marker,
                linewidth=2.8 if thick else 1.5,
                markersize=6 if thick else 4,
                zorder=3 if thick else 2,
                gid=name,
            )
    axes.axhline(1, color=QUIET, linewidth=1.2, zorder=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1024:g}k"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    quiet_frame(axes)
    axes.tick_params(labelleft=True, labelbottom=True)


def _label(axes: Axes) -> None:
    """Every line's name, in the margin at its end."""
    ends = []
    for line in axes.get_lines():
        name = line.get_gid()
        if name in PEERS:
            x, y = line.get_xdata()[-1], line.get_ydata()[-1]
            ends.append((x, y, _STYLE[name][3], _STYLE[name][0], name in _THICK))
    label_lines(axes, ends, last=axes.get_xlim()[1], size=8.5)
