"""Write `parity` as a page, from the JSON it prints: figures, how the errors are spread, and the file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from ..core.documents.error_spread import ErrorSpread
from ..core.tolerance import BASELINE_FACTOR, LARGEST_FACTOR, Tolerance
from .figures import comparison_figure, digits, figure, figures_of, percent
from .model_sections import (
    Document,
    checks_table,
    checks_text,
    interval,
    sidecar_section,
    window_section,
    windows_of,
)
from .page import Chart, Page, Section
from .svg.errors import error_histogram, error_positions
from .table import Column, Mark, Table, numbers, texts

_FIGURES = (
    "max_abs",
    "max_rel",
    "rms",
    "relative_rms",
    "cosine",
    "divergence",
    "agreement",
    "pooled_cosine",
    "least_pooled_cosine",
    "not_finite",
    "expected_not_finite",
    "worst_index",
)
_WORST = 8
_REFERENCES = {"file": "other file's outputs, in float64", "golden": "golden outputs"}


def parity_page(document: Document) -> Page:
    """Make the page; headings begin with the file's name where several were compared."""
    files = document.get("files", [document])
    named = [(f"{PurePath(file['model']).name}: " if len(files) > 1 else "", file) for file in files]
    return Page(
        title="Parity of " + ", ".join(PurePath(file["model"]).name for file in files),
        verdict=_verdict(files)[0],
        mark=_verdict(files)[1],
        lead=" ".join(_lead(file) for file in files),
        warnings=tuple(dict.fromkeys(line for file in files for line in (*file.get("warnings", ()), *file["notes"]))),
        warnings_title="To know",
        sections=tuple(section for before, file in named for section in _sections(file, before)),
        properties=tuple(row for before, file in named for row in _properties(file, before)),
    )


def _verdict(files: Sequence[Document]) -> tuple[str, Mark]:
    if not all(file["passed"] for file in files):
        return "NOT equal", "bad"
    proven = [any(check["status"] == "passed" for check in file["checks"]) for file in files if file.get("checks")]
    return ("Equal", "good") if all(proven) else ("Equal, but this proves nothing", "unsure")


def _lead(file: Document) -> str:
    worst = max(file["comparisons"], key=lambda row: float(row["max_abs"]))
    counts = ("not_finite", "expected_not_finite")
    not_finite = sum(row.get(name, 0) for row in file["comparisons"] for name in counts)
    spoilt = f", and {not_finite:,} values are NaN or Inf" if not_finite else ""
    relation = "are equal" if file["passed"] else "are NOT equal"
    within = Tolerance.from_dict(file["tolerance"]).describe()
    source, against = reference_of(file), PurePath(file["against"]).name
    reference, proof = f"the float64 reference of {against}", ""
    if source["kind"] == "file":
        reference = f"{against}, run by {source['backend']} on {source['provider']},"
        proof = " " + (source["checked"] or f"{against} itself is not proven right") + "."
    if source["kind"] == "golden":
        reference = f"your own model's outputs, {against},"
    return (
        f"{PurePath(file['model']).name} and {reference} {relation} within {within}; "
        f"the largest error is {figure(worst['max_abs'])}{spoilt}.{proof}"
    )


def reference_of(file: Document) -> Document:
    """Return what the file was compared with; documents of older releases name only the float64 reference."""
    reference: Document = file.get("reference", {"kind": "float64"})
    return reference


def _sections(file: Document, before: str) -> list[Section]:
    tables = [_comparisons(file["comparisons"], reference_of(file))]
    if file["tolerance"].get("baseline"):
        tables.append(_baseline_table(file))
    sections = [Section(f"{before}Figures", tables=tuple(tables))]
    if file.get("compared_windows"):
        sections.append(_compared_windows(file["compared_windows"], before))
    views = windows_of(file)
    # The edges of windows show where an error begins or returns; AFT-local has no such edges.
    window = next((view.geometry.window_size for view in views.values() if not view.biases), None)
    for name, saved in file["errors"].items():
        spread = ErrorSpread.from_dict(saved)
        tables = [_sizes(spread), *([_positions(spread)] if spread.positions else [])]
        drawn = partial(_error_charts, spread, file["tolerance"]["atol"], window)
        sections.append(Section(f"{before}Errors of {name}", charts=drawn, tables=tuple(tables)))
    sections += [window_section(view, before + title) for title, view in views.items()]
    # Documents of older releases have no checks but that of golden outputs.
    made = file.get("checks") or [check for check in (file.get("golden"),) if check is not None]
    if made:
        text = f"{checks_text(made)[:1].upper()}{checks_text(made)[1:]}."
        sections.insert(0, Section(f"{before}Checks made now", (text,), tables=(checks_table(made),)))
    if file["sidecar"] is not None:
        checks = file["sidecar"]["checks"]
        text = f"When the file was exported, {checks_text(checks)}."
        sections.append(Section(f"{before}Checks of the export", (text,), tables=(checks_table(checks),)))
        sections.append(sidecar_section(file["sidecar"], f"{before}Sidecar"))
    return sections


def _comparisons(rows: Sequence[Document], against: Document) -> Table:
    figures = figures_of(rows, _FIGURES)
    columns = (*texts("output", "inputs", "result"), *(Column(name, name != "worst_index") for name in figures))
    cells = []
    for row in rows:
        verdict = "ok" if row["passed"] else "FAILED"
        cells.append((row["output"], row["inputs"], verdict, *(comparison_figure(row, name) for name in figures)))
    reference = _REFERENCES.get(against["kind"], "float64 reference")
    note = (
        f"Differences from the {reference}: the largest, the largest relative to the expected value, the root "
        "mean square, and that relative to the expected values'; worst_index is where the tolerance is exceeded, "
        "or most nearly so."
    )
    if "divergence" in figures:
        note += (
            " Of logits, the mean Kullback-Leibler divergence of their softmax in nats, and the share of positions "
            "with the same largest logit."
        )
    if "pooled_cosine" in figures:
        note += " Of hidden states, the cosine of a text's embedding, their mean, with the reference's: mean and least."
    return Table("", columns, tuple(cells), (note,), tuple("" if row["passed"] else "bad" for row in rows))


def _baseline_table(file: Document) -> Table:
    """Make the table of the file's errors beside those of the untouched module in the same precision."""
    baseline = file["tolerance"]["baseline"]
    rows = [
        (row["output"], what, figure(row[name]), figure(baseline[name]), _times(row[name], baseline[name]), f"{most:g}")
        for row in file["overall"]
        for what, name, most in (
            ("root mean square", "relative_rms", _most_rms(row, baseline)),
            ("largest", "relative_max", LARGEST_FACTOR),
        )
    ]
    columns = (*texts("output", "error"), *numbers("file", "untouched module", "times", "at most"))
    note = f"Relative to the root mean square of the outputs, over all inputs. The module: {baseline['source']}."
    return Table("Compared with the untouched module", columns, tuple(rows), (note,))


def _most_rms(row: Document, baseline: Document) -> float:
    """Return how many times the module's error may be the file's: more where the median input decides."""
    beyond = float(row["relative_rms"]) > BASELINE_FACTOR * float(baseline["relative_rms"])
    return LARGEST_FACTOR if beyond and baseline.get("typical_rms") is not None else BASELINE_FACTOR


def _times(own: Any, other: float) -> str:
    return digits(float(own) / other) if other else "–"


def _compared_windows(sides: Sequence[Document], before: str) -> Section:
    """Show the windows of both sides of a comparison that failed."""
    rows = [
        (PurePath(side["of"]).name, side["whose"], line) for side in sides for line in side["windows"] or ["not given"]
    ]
    columns = (*texts("of", "which"), *texts("window", wrap=True))
    listed = [side["windows"] for side in sides if side["windows"]]
    differ = len(listed) > 1 and any(windows != listed[0] for windows in listed)
    text = "They differ, which makes the outputs differ." if differ else "They are the same."
    return Section(
        f"{before}Windows of both", (text,) if len(listed) > 1 else (), tables=(Table("", columns, tuple(rows)),)
    )


def _error_charts(spread: ErrorSpread, atol: float | None, window: int | None) -> list[Chart]:
    at_zero = "There is no tolerance for single elements."
    if atol is not None:
        at_zero = f"The dashed line is the tolerance at a value of 0 ({atol:g}); the tolerance grows with the value."
    charts = [Chart(error_histogram(spread, atol or 0), f"Errors of all {spread.total:,} elements by size. {at_zero}")]
    if spread.positions:
        stretch = "" if spread.width == 1 else f" (a dot stands for {spread.width} positions)"
        edges = "" if window is None else f" Thin lines: edges of the windows of {window}, where there are few."
        caption = f"The largest error at each position{stretch}; red: out of tolerance.{edges}"
        charts.append(Chart(error_positions(spread, atol or 0, window), caption))
    return charts


def _sizes(spread: ErrorSpread) -> Table:
    total = spread.total or 1
    rows = [("none", "", f"{spread.zero:,}", percent(spread.zero / total))] if spread.zero else []
    rows += [(f"1e{k:+03d}", f"1e{k + 1:+03d}", f"{n:,}", _share(n / total)) for k, n in spread.decades() if n]
    columns = numbers("error from", "to", "elements", "share")
    return Table("By size", columns, tuple(rows), ("Over all inputs; NaN and Inf are not included.",))


def _positions(spread: ErrorSpread) -> Table:
    found = zip(spread.positions, spread.largest, spread.beyond, strict=True)
    worst = sorted(found, key=lambda at: (-at[2], -at[1]))[:_WORST]
    rows = [(interval(at, at + spread.width), figure(largest), f"{beyond:,}") for at, largest, beyond in worst]
    columns = numbers("position", "largest error", "out of tolerance")
    marks: tuple[Mark, ...] = tuple("bad" if out else "" for *_, out in worst)
    beyond = sum(1 for count in spread.beyond if count)
    parts = f"{len(spread.positions):,} {'positions' if spread.width == 1 else 'stretches'}"
    note = f"The worst {len(rows)}; of all {parts}, {beyond:,} have elements out of tolerance."
    return Table("By position", columns, tuple(rows), (note,), marks)


def _properties(file: Document, before: str) -> list[tuple[str, str]]:
    return [
        (f"{before}Model", file["model"]),
        (f"{before}Compared with", file["against"]),
        (f"{before}Element type", file["dtype"]),
        (f"{before}Ran on", file["provider"] + (", compiled kernel" if file.get("plugin") else "")),
        (f"{before}Tolerance", Tolerance.from_dict(file["tolerance"]).describe()),
    ]


def _share(part: float) -> str:
    return percent(part) if part >= 0.0005 else "< 0.1 %"
