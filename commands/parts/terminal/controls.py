"""Keep texts from steering the terminal, also in tables: names from outside are shown, and never obeyed."""

from __future__ import annotations

import re
from typing import Literal

from ....reports.table import Table

# The colours of `console.styled`; then control characters of both sets (C0 without tab and line feed, C1), and those
# that change the direction of writing.
_COLOUR = r"\x1b\[(?:0|1|3[0-7])m"
_STEERING = re.compile(rf"{_COLOUR}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """Write characters that would steer a terminal as escapes; tabs, line feeds and our own colours stay."""
    return _STEERING.sub(lambda found: found[0] if len(found[0]) > 1 else ascii(found[0])[1:-1], text)


def print_table(table: Table, *, width: int | None = 120, overflow: Literal["ellipsis", "fold"] = "ellipsis") -> None:
    """Print a table, without its notes; its cells show their texts as they are: brackets are no markup of Rich's.

    Args:
        table: with its verdicts in the last column; those of rows that are marked as bad are red.
        width: most characters of a line; None for the terminal's width.
        overflow: whether a text that is too wide is cut, or goes on in the next line.
    """
    from rich import console, text
    from rich.table import Table as RichTable

    shown = RichTable(title=table.title or None, title_justify="left", box=None, pad_edge=False)
    for column in table.columns:
        shown.add_column(text.Text(column.name), justify="right" if column.number else "left", overflow=overflow)
    for row, mark in zip(table.rows, table.marks or [""] * len(table.rows), strict=True):
        cells = [text.Text(harmless(cell)) for cell in row]
        if mark == "bad":
            cells[-1].stylize("red")
        shown.add_row(*cells)
    console.Console(width=width).print(shown)
