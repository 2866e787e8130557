"""Draws time over length, one panel a window, from the results of `benchmarks.gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

_COLORS = {"kernel": "#0a5fd1", "flex": "#c2410c", "cudnn": "#0f766e", "flash": "#7c3aed", "sdpa": "#57606a"}
_QUIET = "#6e7781"


def draw(document: dict[str, Any], path: Path) -> Path:
    """One row a kind of window (causal or not, exact or block-local), one column a window size; returns the file.

    Of head sizes and types those of the first case are drawn.
    """
    first = document["cases"][0]
    drawn = [c for c in document["cases"] if (c["head_dim"], c["dtype"]) == (first["head_dim"], first["dtype"])]
    kinds = sorted({(c["causal"], c["exact"]) for c in drawn}, reverse=True)
    windows = sorted({c["window"] for c in drawn})
    figure, axes = pyplot.subplots(
        len(kinds), len(windows), figsize=(3.6 * len(windows) + 1, 3 * len(kinds) + 1), squeeze=False, sharex=True
    )
    for row, (causal, exact) in enumerate(kinds):
        for column, window in enumerate(windows):
            axis = axes[row][column]
            mine = [c for c in drawn if (c["causal"], c["exact"], c["window"]) == (causal, exact, window)]
            _panel(axis, mine)
            axis.set_title(f"{'causal' if causal else 'non-causal'} {'exact' if exact else 'block-local'}, w {window}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"Windowed attention on {document['device']['name']}: d {first['head_dim']}, {first['dtype']}")
    figure.supxlabel("sequence length", y=0.06)
    figure.supylabel("ms a call")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _panel(axis: Any, results: list[dict[str, Any]]) -> None:
    lengths = [result["length"] for result in results]
    floors = [result["floor_ms"] for result in results]
    axis.plot(lengths, floors, color=_QUIET, linestyle=(0, (2, 2)), label="roofline")
    for name, color in _COLORS.items():
        points = [(r["length"], r["candidates"][name]["median_ms"]) for r in results if _timed(r, name)]
        if points:
            axis.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")


def _timed(result: dict[str, Any], name: str) -> bool:
    return "median_ms" in result["candidates"].get(name, {})
