"""`parity` as a page, from the JSON it prints: the figures, how the errors are spread, and what the file is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from ..core.documents.error_spread import ErrorSpread
from .figures import figure, percent
from .model_sections import (
    Document,
    checks_table,
    checks_text,
    sidecar_section,
    window_section,
    window_titles,
    windows_of,
)
from .page import Page, Section
from .table import Column, Table

_FIGURES = ("max_abs", "max_rel", "rms", "relative_rms", "cosine", "not_finite", "worst_index")
_WORST = 8


def parity_page(document: Document) -> Page:
    """The page without its charts."""
    files = files_of(document)
    names = [PurePath(file["model"]).name for file in files]
    return Page(
        title="Parity of " + ", ".join(names),
        verdict="Equal" if document["passed"] else "NOT equal",
        mark="good" if document["passed"] else "bad",
        lead=" ".join(_lead(file) for file in files),
        warnings=tuple(dict.fromkeys(line for file in files for line in file["notes"])),
        warnings_title="To know",
        sections=tuple(section for file in files for section in _sections(file, prefix(file, files))),
        facts=tuple(fact for file in files for fact in _facts(file, prefix(file, files))),
    )


def files_of(document: Document) -> Sequence[Document]:
    """One document a file, also where several were compared."""
    files: Sequence[Document] = document.get("files", [document])
    return files


def prefix(file: Document, files: Sequence[Document]) -> str:
    """What tells a file's headings from those of the others."""
    return f"{PurePath(file['model']).name}: " if len(files) > 1 else ""


def errors_title(name: str, before: str) -> str:
    """The heading above the spread of one output."""
    return f"{before}Errors of {name}"


def _lead(file: Document) -> str:
    worst = max(file["comparisons"], key=lambda row: _number(row["max_abs"]))
    relation = "are equal" if file["passed"] else "are NOT equal"
    judge, against = judge_of(file), PurePath(file["against"]).name
    reference, proof = f"the float64 reference of {against}", ""
    if judge["kind"] == "file":
        reference = f"{against}, run by {judge['backend']} on {judge['provider']},"
        proof = " " + (judge["checked"] or f"That {against} itself is right is not proven here") + "."
    return (
        f"{PurePath(file['model']).name} and {reference} {relation} within {tolerance_text(file)}; "
        f"the largest error is {figure(worst['max_abs'])}.{proof}"
    )


def judge_of(file: Document) -> Document:
    """Who judged; documents of older releases do not say: the oracle."""
    judge: Document = file.get("reference", {"kind": "oracle"})
    return judge


def tolerance_text(file: Document) -> str:
    """The criterion."""
    tolerance = file["tolerance"]
    floor = "" if tolerance["cosine"] is None else f", cosine at least {tolerance['cosine']}"
    return f"{tolerance['atol']:g} + {tolerance['rtol']:g}·|x|{floor}"


def _sections(file: Document, before: str) -> list[Section]:
    sections = [Section(f"{before}Figures", tables=(_comparisons(file["comparisons"], judge_of(file)),))]
    for name, saved in file["errors"].items():
        sections.append(_errors(ErrorSpread.from_dict(saved), errors_title(name, before)))
    views = windows_of(file)
    for title, view in zip(window_titles(views), views, strict=True):
        sections.append(window_section(view, before + title))
    if file["sidecar"] is not None:
        checks = file["sidecar"]["checks"]
        text = f"When the file was exported, {checks_text(checks)}."
        sections.append(Section(f"{before}Checks of the export", (text,), tables=(checks_table(checks),)))
        sections.append(sidecar_section(file["sidecar"], f"{before}Sidecar"))
    return sections


def _comparisons(rows: Sequence[Document], judge: Document) -> Table:
    columns = (
        Column("output", False),
        Column("inputs", False),
        Column("result", False),
        *(Column(name, name != "worst_index") for name in _FIGURES),
    )
    cells = [
        (row["output"], row["inputs"], "ok" if row["passed"] else "FAILED", *(figure(row[name]) for name in _FIGURES))
        for row in rows
    ]
    reference = "float64 reference" if judge["kind"] == "oracle" else "other file's outputs, in float64"
    note = (
        f"Differences from the {reference}: the largest, the largest relative to the expected value, the root "
        "mean square, and that relative to the expected values'; worst_index is where the tolerance is broken, or "
        "nearest to it."
    )
    return Table("", columns, tuple(cells), (note,), tuple("" if row["passed"] else "bad" for row in rows))


def _errors(spread: ErrorSpread, title: str) -> Section:
    tables = [_sizes(spread)]
    if spread.positions:
        tables.append(_positions(spread))
    return Section(title, (), tables=tuple(tables))


def _sizes(spread: ErrorSpread) -> Table:
    total = spread.total or 1
    rows = [("none", "", f"{spread.zero:,}", percent(spread.zero / total))] if spread.zero else []
    rows += [(f"1e{k:+03d}", f"1e{k + 1:+03d}", f"{n:,}", _share(n / total)) for k, n in spread.decades() if n]
    columns = (Column("error from"), Column("to"), Column("elements"), Column("share"))
    return Table("By size", columns, tuple(rows), ("Over all inputs; NaN and Inf are not among them.",))


def _positions(spread: ErrorSpread) -> Table:
    order = sorted(range(len(spread.positions)), key=lambda i: (-spread.beyond[i], -spread.largest[i]))[:_WORST]
    rows = [
        (
            f"{spread.positions[i]:,}"
            + (f" to {spread.positions[i] + spread.width - 1:,}" if spread.width > 1 else ""),
            figure(spread.largest[i]),
            f"{spread.beyond[i]:,}",
        )
        for i in order
    ]
    columns = (Column("position"), Column("largest error"), Column("out of tolerance"))
    marks = tuple("bad" if spread.beyond[i] else "" for i in order)
    beyond = sum(1 for count in spread.beyond if count)
    parts = "positions" if spread.width == 1 else "stretches"
    note = (
        f"The worst {len(rows)}; of all {len(spread.positions):,} {parts}, {beyond:,} have elements out of tolerance."
    )
    return Table("By position", columns, tuple(rows), (note,), marks)  # type: ignore[arg-type]


def _facts(file: Document, before: str) -> list[tuple[str, str]]:
    return [
        (f"{before}Model", file["model"]),
        (f"{before}Compared with", file["against"]),
        (f"{before}Element type", file["dtype"]),
        (f"{before}Ran on", file["provider"] + (", compiled kernel" if file.get("plugin") else "")),
        (f"{before}Tolerance", tolerance_text(file)),
    ]


def _share(part: float) -> str:
    return percent(part) if part >= 0.0005 else "< 0.1 %"


def _number(value: Any) -> float:
    """A figure that JSON may hold as a text ("inf")."""
    return float(value)
