"""The peers' grid and the whole model: tables on the terminal, and a figure of the grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .machine import ROOT
from .peers import GEOMETRIES, MAIN_WINDOW, fastest_peer
from .report import _print_targets, _table, console

FIGURE = ROOT / "docs" / "images" / "peers.png"
_COLORS = ("#0a5fd1", "#c2410c", "#a16207", "#be185d", "#57606a", "#0f766e", "#65a30d", "#7c3aed", "#b91c1c")


def print_peers(result: dict[str, Any]) -> None:
    """One row a cell: the node, every peer over the node, the reasons of those left out below."""
    peers = [name for name in result["labels"] if name != "node"]
    table = _table("Time of the node, and of every peer over it", "cell", "limit ms", "node ms", "node / limit", *peers)
    reasons: dict[tuple[str, str], int] = {}
    for cell in result["cells"]:
        ours = cell["candidates"]["node"]
        row = []
        for name in peers:
            entry = cell["candidates"][name]
            if "skipped" in entry:
                reasons[name, entry["skipped"]] = reasons.get((name, entry["skipped"]), 0) + 1
            row.append(f"{entry['median_ms'] / ours['median_ms']:.2f}" if "median_ms" in entry else "–")
        table.add_row(
            f"{cell['dtype']} {cell['geometry']} w={cell['window']['window_size']} n={cell['length']}"
            + (" mask" if cell["masked"] else ""),
            f"{cell['limit_ms']:.2f}",
            f"{ours['median_ms']:.2f}",
            f"{ours['over_limit']:.2f}",
            *row,
        )
    console.print(table)
    for (name, reason), count in sorted(reasons.items()):
        console.print(f"– {result['labels'][name]}, {count} cells: {reason}")
    slower = [(ratio, peer, cell) for cell in result["cells"] for peer, ratio in [fastest_peer(cell)] if ratio > 1]
    for ratio, peer, cell in sorted(slower, key=lambda found: -found[0])[:10]:
        where = f"{cell['dtype']} {cell['geometry']} w={cell['window']['window_size']} n={cell['length']}"
        console.print(f"slower than {result['labels'][peer]} by {ratio - 1:.0%}: {where}{' mask' * cell['masked']}")
    _print_targets(result)


def print_model(result: dict[str, Any]) -> None:
    """Where one run's time goes, then the calls."""
    table = _table(f"{result['checkpoint']}, {result['seq_len']} tokens, one run by operator", "part", "ms")
    table.add_row("matrix products", f"{result['products_ms']:.2f}")
    table.add_row("attention nodes", f"{result['attention_ms']:.2f}")
    table.add_section()
    for name, value in result["others_ms"].items():
        table.add_row(name, f"{value:.2f}")
    console.print(table)
    calls = _table("Calls", "candidate", "median ms", "p10–p90")
    for name, entry in result["candidates"].items():
        calls.add_row(name, f"{entry['median_ms']:.1f}", f"{entry['p10_ms']:.1f}–{entry['p90_ms']:.1f}")
    console.print(calls)
    _print_targets(result)


def draw(result: dict[str, Any], path: Path = FIGURE) -> Path:
    """A panel a geometry: times over the length at the main window, fp32, no mask; returns the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(GEOMETRIES), figsize=(14, 4.6), sharey=True, facecolor="white")
    for axes, (geometry, *_) in zip(panels, GEOMETRIES, strict=True):
        cells = [
            cell
            for cell in result["cells"]
            if cell["geometry"] == geometry
            and cell["window"]["window_size"] == MAIN_WINDOW
            and cell["dtype"] == "fp32"
            and not cell["masked"]
        ]
        for color, (name, label) in zip(_COLORS, result["labels"].items(), strict=True):
            measured = [cell for cell in cells if "median_ms" in cell["candidates"][name]]
            axes.plot(
                [cell["length"] for cell in measured],
                [cell["candidates"][name]["median_ms"] for cell in measured],
                color=color,
                marker="o",
                markersize=5 if name == "node" else 3,
                linewidth=3 if name == "node" else 1.5,
                zorder=3 if name == "node" else 2,
                label=label,
            )
        lengths, limits = zip(*[(cell["length"], cell["limit_ms"]) for cell in cells], strict=True)
        axes.plot(lengths, limits, color="#6e7781", linestyle=":", label="matmul limit")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
        axes.set_title(geometry, loc="left")
        axes.grid(axis="y", color="#d8dee4")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("ms")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(0.905, 0.5), frameon=False, fontsize=9)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    pyplot.close(figure)
    return path
