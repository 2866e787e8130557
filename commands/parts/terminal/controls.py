"""Keep texts from steering the terminal, also in tables: names from outside are shown, and never obeyed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# The colours of `console.styled`; then control characters of both sets (C0 without tab and line feed, C1), and those
# that change the direction of writing.
_COLOUR = r"\x1b\[(?:0|1|3[0-7])m"
_STEERING = re.compile(rf"{_COLOUR}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """Write characters that would steer a terminal as escapes; tabs, line feeds and our own colours stay."""
    return _STEERING.sub(lambda found: found[0] if len(found[0]) > 1 else ascii(found[0])[1:-1], text)


def print_table(
    columns: Mapping[str, bool],
    rows: Iterable[Sequence[str | tuple[str, str]]],
    title: str | None = None,
    width: int | None = 120,
    **column_style: Any,
) -> None:
    """Print a table whose cells show their texts as they are: brackets in a name are no markup of Rich's.

    Args:
        columns: their names, and whether they are numbers, aligned to the right.
        rows: texts; or a text and its style.
        title: the line above it.
        width: its characters; None for the terminal's.
        column_style: of all columns, as Rich's `add_column` takes it.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, is_number in columns.items():
        table.add_column(Text(name), justify="right" if is_number else "left", **column_style)
    for row in rows:
        cells = ((cell, "") if isinstance(cell, str) else cell for cell in row)
        table.add_row(*(Text(harmless(text), style) for text, style in cells))
    Console(width=width).print(table)
