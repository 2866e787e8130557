"""The peers' grid as tables: a table a geometry and element type, on the terminal and in Markdown.

All figures are times over the limit, so that rows of different lengths compare; the smallest of a row is the fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..limit.roofline import name_of_limit
from ..report import console, print_targets
from .grid import GEOMETRIES, NUMPY_TYPE, Cell
from .run import NOISE, Row, fastest_peer, times
from .table import OURS, PEERS

_NONE = "–"


@dataclass(frozen=True)
class Lines:
    """One table.

    Args:
        title: geometry and element type.
        columns: their heads.
        rows: cells of text; of each row which column is the fastest.
    """

    title: str
    columns: list[str]
    rows: list[tuple[list[str], int | None]]


def tables(result: Row) -> Iterator[Lines]:
    """The tables of a result, those with rows."""
    columns = [
        "w",
        "n",
        "mask",
        "limit ms",
        *(peer.short for peer in PEERS.values()),
        "best peer",
        *(f"/{name}" for name in OURS),
    ]
    first = columns.index(PEERS[OURS[0]].short)
    for shape in GEOMETRIES:
        for dtype in NUMPY_TYPE:
            rows = [row for row in result["cells"] if row["shape"] == shape and row["dtype"] == dtype]
            lines = []
            for row in rows:
                known = times(row)
                order = list(PEERS)
                fastest = first + order.index(min(known, key=lambda name: known[name]))
                lines.append((_cells(row), fastest))
            if lines:
                yield Lines(f"{shape}, {dtype}", columns, lines)


def _cells(row: Row) -> list[str]:
    known, limit = times(row), row["limit_ms"]
    over = [_short(known[name] / limit) if name in known else _NONE for name in PEERS]
    peers = [fastest_peer(row, ours) for ours in OURS]
    best = next((PEERS[peer].short for peer, _ in peers if peer), _NONE)
    ahead = [f"{1 / ratio:.2f}" if peer else _NONE for peer, ratio in peers]
    return [
        str(row["window"]),
        f"{row['length']:,}",
        "yes" if row["masked"] else "",
        _short(limit),
        *over,
        best,
        *ahead,
    ]


def _short(value: float) -> str:
    """Three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def reasons(result: Row) -> list[str]:
    """Who was left out, in how many cells, and why."""
    found: Counter[tuple[str, str]] = Counter()
    for row in result["cells"]:
        for name, entry in row["candidates"].items():
            if "skipped" in entry:
                found[PEERS[name].label, entry["skipped"]] += 1
    return [f"{label}, {count} cells: {reason}" for (label, reason), count in sorted(found.items())]


def behind(result: Row) -> list[str]:
    """The cells in which one of ours is slower than a peer by more than noise, worst first."""
    found = []
    for row in result["cells"]:
        for ours in OURS:
            peer, ratio = fastest_peer(row, ours)
            if ratio > NOISE:
                found.append((ratio, f"{PEERS[ours].short} / {PEERS[peer].short} {ratio:.2f}: {Cell.of(row).name}"))
    return [text for _, text in sorted(found, key=lambda entry: -entry[0])]


def _legend(result: Row) -> list[str]:
    labels = ", ".join(f"{peer.short}: {peer.label}" for peer in PEERS.values() if peer.short != peer.label)
    ours = " and ".join(OURS)
    return [
        f"Times over {name_of_limit(result['cells'][0])}. {labels}.",
        f"The last columns: the fastest peer and its time over that of {ours}; below 1, ours is slower. "
        "A peer six times slower than ours is timed by the best of at most three calls within a second, so its buffers "
        "may be cold: several times what it takes when warm.",
        f"{_NONE} was not measured: {'; '.join(reasons(result))}." if reasons(result) else "",
    ]


def print_peers(result: Row) -> None:
    """All tables, what ours lose, the targets."""
    for lines in tables(result):
        table = Table(title=lines.title, title_justify="left", padding=(0, 1, 0, 0), box=None)
        for column in lines.columns:
            table.add_column(column, justify="right", no_wrap=True)
        for cells, fastest in lines.rows:
            table.add_row(*(f"[bold green]{text}[/]" if i == fastest else text for i, text in enumerate(cells)))
        console.print(table)
    for line in _legend(result):
        console.print(line, soft_wrap=True, markup=False)
    for line in behind(result):
        console.print(f"[red]slower[/]  {line}")
    print_targets(result)


def markdown(result: Row) -> str:
    """The same as a page."""
    setting, versions = result["setting"], result["versions"]
    parts = [
        f"# The attention node beside every alternative, {result['date'][:10]}",
        f"Batch {setting['batch']}, {setting['heads']} heads of {setting['head_dim']}, {setting['threads']} threads, "
        f"{result['machine']['cpu']}; onnxruntime {versions['onnxruntime']}, torch {versions['torch']}. "
        f"{len(result['cells'])} cells.",
        *filter(None, _legend(result)),
    ]
    for lines in tables(result):
        bold = (
            [f"**{text}**" if i == fastest else text for i, text in enumerate(cells)] for cells, fastest in lines.rows
        )
        body = [lines.columns, ["---:"] * len(lines.columns), *bold]
        parts.append(f"## {lines.title}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in body))
    lost = [f"- {line}" for line in behind(result)]
    parts.append("## Where ours is slower\n\n" + ("\n".join(lost) or f"In no cell by more than {NOISE - 1:.0%}."))
    asked = [_target(target) for target in result["targets"]]
    parts.append("## Targets\n\n" + "\n".join(["| | measured | at most | |", "|---|---:|---:|---|", *asked]))
    return "\n\n".join(parts) + "\n"


def _target(target: dict[str, Any]) -> str:
    verdict = "met" if target["met"] else "not met"
    return f"| {target['what']} | {target['value']:.2f} | {target['limit']:.2f} | {verdict} |"
