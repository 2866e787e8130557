"""Write `bisect` as a page, from the JSON it prints: fault, cause, and the error at every module boundary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import PurePath

from .figures import comparison_figure, figure
from .model_sections import Document
from .page import Chart, Page, Section
from .svg.errors import Step, error_steps
from .table import Column, Table, numbers, texts

_FIGURES = ("max_abs", "relative_rms", "cosine", "not_finite", "worst_index")


def bisect_page(document: Document) -> Page:
    """Make the page."""
    fault = document["fault"]
    sections = [] if fault is None else [_fault(fault)]
    drawn = partial(_chart, document["boundaries"], fault)
    sections.append(Section("Module boundaries", charts=drawn, tables=(_table(document["boundaries"]),)))
    return Page(
        title="Bisection of " + PurePath(document["model"]).name,
        verdict="No fault" if fault is None else "Fault found",
        mark="good" if fault is None else "bad",
        lead=_lead(document),
        warnings=tuple(document["notes"]),
        warnings_title="To know",
        sections=tuple(sections),
        properties=(
            ("Model", document["model"]),
            ("Compared with", document["against"]),
            ("Element type", document["dtype"]),
            ("Ran on", document["provider"]),
        ),
    )


def _chart(rows: Sequence[Document], fault: Document | None) -> list[Chart]:
    """Draw the relative error along the graph."""
    steps = [Step(_name(row), float(row["relative_rms"]), row["passed"]) for row in rows]
    marked = None if fault is None else next((n for n, row in enumerate(rows) if row == fault["boundary"]), None)
    caption = (
        "The error's root mean square at each boundary, relative to that of the values, in the order of the graph. "
        "Red: out of tolerance. NaN and Inf are not included."
    )
    return [Chart(error_steps(steps, marked), caption)]


def _name(row: Document) -> str:
    """Write a boundary in words: `layers.0.to_qkv (output)`."""
    return f"{row['module'] or 'the model'} ({row['role']})"


def _lead(document: Document) -> str:
    fault, rows = document["fault"], document["boundaries"]
    if fault is None:
        largest = document["largest"]
        return (
            f"All {len(rows):,} module boundaries agree with the float64 model; the largest error is at "
            f"{_name(largest)}, {figure(largest['relative_rms'])} of its own size (rms)."
        )
    module = fault["module"] or "the model itself, between its modules"
    return f"{module} is the first to leave the tolerance. Likely cause: {fault['cause']}."


def _fault(fault: Document) -> Section:
    text = (f"Evidence: {fault['evidence']}", "Its inputs and its outputs:")
    return Section("Fault", text, tables=(_table([*fault["before"], fault["boundary"]]),))


def _table(rows: Sequence[Document]) -> Table:
    """Make the table of boundaries."""
    figures = (Column(name, name != "worst_index") for name in _FIGURES)
    columns = (*numbers("no."), *texts("module", "what", "result"), *figures)
    cells = []
    for number, row in enumerate(rows, 1):
        shown = (row["module"] or "(the model)", row["role"], "ok" if row["passed"] else "WRONG")
        cells.append((str(number), *shown, *(comparison_figure(row, name) for name in _FIGURES)))
    return Table("", columns, tuple(cells), marks=tuple("" if row["passed"] else "bad" for row in rows))
