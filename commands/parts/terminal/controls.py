"""Print tables without interpreting markup in their cells."""

from __future__ import annotations

from typing import Literal

from ....core.spelling import spelled
from ....reports.table import Table


def print_table(table: Table, *, width: int | None = 120, overflow: Literal["ellipsis", "fold"] = "ellipsis") -> None:
    """Print a table, without its notes; its cells show their texts as they are: brackets are no markup of Rich's.

    Args:
        table: with its verdicts in the last column; those of rows that are marked as bad are red.
        width: most characters of a line; None for the terminal's width.
        overflow: whether a text that is too wide is cut, or goes on in the next line.
    """
    from rich import console, text
    from rich.table import Table as RichTable

    shown = RichTable(title=spelled(table.title) or None, title_justify="left", box=None, pad_edge=False)
    for column in table.columns:
        shown.add_column(text.Text(column.name), justify="right" if column.number else "left", overflow=overflow)
    for row, mark in zip(table.rows, table.marks or [""] * len(table.rows), strict=True):
        cells = [text.Text(spelled(cell)) for cell in row]
        if mark == "bad":
            cells[-1].stylize("red")
        shown.add_row(*cells)
    console.Console(width=width).print(shown)
