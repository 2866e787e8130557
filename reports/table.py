"""Define a table that console, Markdown and HTML show alike: its cells are texts already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..core.spelling import markdown_text

# How a row or a verdict is highlighted; "" for not at all. The text says the same, so that nothing depends on colour.
Mark = Literal["good", "bad", "unsure", ""]


@dataclass(frozen=True)
class Column:
    """A heading; numbers are aligned to the right, and long texts are broken into lines with `wrap`."""

    name: str
    number: bool = True
    wrap: bool = False


def numbers(*names: str) -> tuple[Column, ...]:
    """Return columns of numbers."""
    return tuple(map(Column, names))


def texts(*names: str, wrap: bool = False) -> tuple[Column, ...]:
    """Return columns of texts."""
    return tuple(Column(name, False, wrap) for name in names)


@dataclass(frozen=True)
class Table:
    """Rows of text under headings.

    Args:
        title: what it shows; may be empty.
        columns: the headings.
        rows: one text per column.
        notes: lines below it that explain the figures.
        marks: one per row, for colour; empty where no row is highlighted.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()


def markdown(table: Table) -> str:
    """Write the table in GitHub's Markdown; texts in its cells cannot become markup."""
    lines = [f"### {markdown_text(table.title)}", ""] if table.title else []
    lines.append(_line([markdown_text(column.name) for column in table.columns]))
    lines.append(_line(["---:" if column.number else "---" for column in table.columns]))
    lines += [_line([markdown_text(cell) for cell in row]) for row in table.rows]
    for note in table.notes:
        lines += ["", markdown_text(note)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
