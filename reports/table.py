"""A table that console, Markdown and HTML show alike: the cells are text already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

# How a row or a verdict stands out; "" does not. The text says the same: colour is never alone.
Mark = Literal["good", "bad", "unsure", ""]


@dataclass(frozen=True)
class Column:
    """A heading; numbers stand to the right, and long texts are broken into lines where `wrap` says so."""

    name: str
    number: bool = True
    wrap: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text under headings.

    Args:
        title: what it shows; may be empty.
        columns: the headings.
        rows: one text a column.
        notes: lines below it, that say what the figures are.
        marks: one a row, for colour; empty where no row stands out.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()


def untitled(table: Table) -> Table:
    """The table without its title, where a heading says it already."""
    return replace(table, title="")


def markdown(table: Table) -> str:
    """The table in GitHub's Markdown; what stands in its cells cannot become markup."""
    lines = [f"### {escape_markdown(table.title)}", ""] if table.title else []
    lines.append(_line([escape_markdown(column.name) for column in table.columns]))
    lines.append(_line(["---:" if column.number else "---" for column in table.columns]))
    lines += [_line([escape_markdown(cell) for cell in row]) for row in table.rows]
    for note in table.notes:
        lines += ["", escape_markdown(note)]
    return "\n".join(lines) + "\n"


# `*` and `_` inside words are common in names of modules and files.
_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\|`*_[]<>#~"} | {"&": "&amp;"})


def escape_markdown(text: str) -> str:
    """The text as Markdown that shows it, on one line."""
    return " ".join(text.split()).translate(_SPECIAL)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
