"""Write `inspect` as a page, from the JSON it prints: an exported file, an engine, or a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from ..core.documents.proof import no_window, not_proven
from ..core.documents.sidecar import Sidecar
from .figures import size
from .model_sections import (
    Document,
    checks_table,
    checks_text,
    sidecar_section,
    signature_table,
    window_section,
    windows_of,
)
from .page import Chart, Page, Section
from .svg.bars import Bar, bars
from .table import Mark, Table, numbers, texts

_PROPERTIES = texts("property", "value", wrap=True)
_FORGED = "As the sidecar states; anyone who can write it can forge them. localattn parity compares the file again."
_MOST_OPERATORS, _MOST_BARS = 12, 8


def onnx_page(document: Document) -> Page:
    """Make the page of an exported file."""
    sidecar = document["sidecar"] if document["sidecar_matches"] else None
    warnings = [f"{name}, which holds weights, is missing." for name in document["missing_external_data"]]
    if document["refused"]:
        warnings.append(f"No engine may open this file: {document['refused']}")
    if document["sidecar"] is not None and sidecar is None:
        warnings.append("The sidecar was NOT written for this file: its SHA-256 differs. Do not rely on the sidecar.")
    checks = [] if sidecar is None else sidecar["checks"]
    doubts = [] if sidecar is None else not_proven(sidecar.get("unproven", ()), document["path"])
    if sidecar is not None:
        parsed = Sidecar.model_validate(sidecar)
        doubts = [*no_window(parsed.windows, parsed.checks, document["path"]), *doubts]
    kind = "ONNX" if sidecar is None else sidecar["class"]
    summary = (
        "There is no sidecar, so its checkpoint and checks are unknown."
        if sidecar is None
        else f"At export {checks_text(checks)}."
    )
    sections = [Section("Checks of the export", (_FORGED,), tables=(checks_table(checks),))] if checks else []
    sections.append(_graph(document))
    if sidecar is not None:
        sections.append(sidecar_section(sidecar, "Sidecar"))
    weights = f"{document['weight_dtype'] or 'no'} weights of {size(document['initializer_bytes'])}"
    lead = f"{kind}, {size(document['file_bytes'])}, {weights}. {summary}"
    return _file_page(document, lead, checks, warnings, doubts, sections, ("Written by", document["producer"]))


def engine_page(document: Document) -> Page:
    """Make the page of an engine."""
    warnings = [] if document["unchanged"] else ["The sidecar was NOT written for this engine: its SHA-256 differs."]
    warnings += [document["plugin_problem"]] if document["plugin_problem"] else []
    checks = document["checks"]
    doubts = not_proven((document["model"] or {}).get("unproven", ()), document["path"])
    built = Section("Checks of the build", tables=(checks_table(checks),))
    sections = [built, _built(document), _layers(document)]
    if document["model"] is not None:
        exported = document["model"]["checks"]
        sections.append(Section("Checks of the export", tables=(checks_table(exported),)))
        sections.append(sidecar_section(document["model"], "Sidecar of the ONNX file"))
    library = f"{document['backend']} {document['library_version']}"
    lead = (
        f"Engine of {document['onnx_name']} for {', '.join(document['targets'])}, {document['dtype']}, "
        f"{size(document['engine_bytes'])}, by {library}. At the build {checks_text(checks)}."
    )
    return _file_page(document, lead, checks, warnings, doubts, sections, ("Built", document["created"]))


def _file_page(
    document: Document,
    lead: str,
    checks: Sequence[Document],
    warnings: Sequence[str],
    doubts: Sequence[str],
    sections: Sequence[Section],
    origin: tuple[str, str],
) -> Page:
    """Make the page of a file that runs: its signature and windows before all other sections."""
    verdict, mark = _verdict(checks, bool(warnings), bool(doubts))
    signature = Section("Inputs and outputs", tables=(signature_table(document),))
    return Page(
        title=PurePath(document["path"]).name,
        lead=lead,
        verdict=verdict,
        mark=mark,
        warnings=(*warnings, *doubts),
        warnings_title="Before using it",
        sections=(signature, *_windows(document), *sections),
        properties=(("File", document["path"]), origin),
    )


def checkpoint_page(document: Document) -> Page:
    """Make the page of a checkpoint."""
    needed = document["needed"]
    entries = [
        (name, _text(entry["value"]), entry["from"] or how)
        for how, group in (("the weights", document["inferred"]), ("the configuration", document["given"]))
        for name, entry in group.items()
    ]
    # Each with its value, or a placeholder.
    template: Document = document["template"] or {"kwargs": {}}
    missing = [(name, _text(value), document["save_as"]) for name, value in template["kwargs"].items()]
    sections = []
    for title, column, listed in (
        ("Arguments", "given by", entries),
        ("In the checkpoint, not used", "why", [(x["from"], x["value"], x["why"]) for x in document["unused"]]),
        ("To complete", "file", missing if needed else []),
    ):
        if listed:
            columns = (*texts("argument"), *texts("value", column, wrap=True))
            sections.append(Section(title, tables=(Table("", columns, tuple(listed)),)))
    sections += _windows(document)
    for title, key in (("Missing tensors", "missing"), ("Unexpected tensors", "unexpected")):
        if document[key]:
            rows = tuple((name,) for name in document[key])
            sections.append(Section(title, tables=(Table("", texts("tensor", wrap=True), rows),)))
    summary = document["class"] or "Unknown class"
    counts = f"{document['tensors']:,} tensors, {document['parameters']:,} parameters"
    return Page(
        title=PurePath(document["path"]).name,
        lead=f"{summary}: {counts}, {size(document['bytes'])}.",
        verdict="More is needed" if needed else "Ready to export",
        mark="unsure" if needed else "good",
        warnings=(*document["notes"], *needed.splitlines()),
        warnings_title="To know",
        sections=tuple(sections),
        properties=(
            ("File", document["path"]),
            ("Configuration", document["config"] or "none"),
            ("SHA-256", document["sha256"]),
        ),
    )


def _verdict(checks: Sequence[Document], spoilt: bool, doubts: bool) -> tuple[str, Mark]:
    statuses = {check["status"] for check in checks}
    if spoilt:
        return "Do not use", "bad"
    if "failed" in statuses:
        return "A check failed", "bad"
    if not statuses or "not proven" in statuses:
        return "Not proven", "unsure"
    if "skipped" in statuses:
        return "Checked in part", "unsure"
    if doubts:
        return "Not proven against your own model", "unsure"
    return "Checked", "good"


def _windows(document: Document) -> list[Section]:
    return [window_section(view, title) for title, view in windows_of(document).items()]


def _graph(document: Document) -> Section:
    counts = sorted(document["nodes"].items(), key=lambda item: (-item[1], item[0]))
    rows = [(name, f"{count:,}") for name, count in counts[:_MOST_OPERATORS]]
    others = counts[_MOST_OPERATORS:]
    if others:
        rows.append((f"{len(others)} other operators", f"{sum(count for _, count in others):,}"))
    properties = [
        ("IR version", str(document["ir_version"])),
        ("Operator sets", ", ".join(f"{domain} {number}" for domain, number in document["opsets"].items())),
        *((f"Weights, {name}", size(count)) for name, count in document["weight_bytes"].items()),
        *(("Weights in", name) for name in document["external_data"]),
        *((f"Function {f['domain']}::{f['name']}", f"{f['nodes']} standard operators") for f in document["functions"]),
    ]
    operators = Table("Operators", (*texts("operator"), *numbers("nodes")), tuple(rows))
    text = f"{sum(document['nodes'].values()):,} nodes, without those in function definitions."
    return Section(
        "Graph", (text,), partial(_operators, counts), (Table("", _PROPERTIES, tuple(properties)), operators)
    )


def _operators(counts: Sequence[tuple[str, int]]) -> list[Chart]:
    drawn = [Bar(name, count, text=f"{count:,}") for name, count in counts[:_MOST_BARS]]
    return [Chart(bars(drawn, "Operators", "nodes", colour=0), "The most frequent operators.")] if drawn else []


def _built(document: Document) -> Section:
    plugin, options = document["plugin"], document["options"]
    rows = [
        ("Built", f"{document['created']}, in {document['seconds']:.0f} s"),
        ("On", document["device"] or "no GPU"),
        ("For", f"{', '.join(document['targets'])}, {document['platform']}"),
        ("By", f"{document['backend']} {document['library_version']}"),
        ("From", document["onnx_name"]),
        ("SHA-256 of that file", document["onnx_sha256"]),
        ("SHA-256 of the engine", document["engine_sha256"]),
        ("Plugin requested", options["plugin"]),
    ]
    if plugin is None:
        rows.append(("Attention", "built from standard operators"))
    else:
        where = plugin["path"] or "inside the engine"
        rows.append(("Attention", f"{plugin['kind']}, {len(plugin['layers'])} layers, {where}"))
    rows += [
        (f"Sizes of {p['input']}", f"from {_text(p['min'])} to {_text(p['max'])}, best at {_text(p['opt'])}")
        for p in options["profiles"]
    ]
    rows += [(f"Version of {name}", version) for name, version in document["versions"].items()]
    return Section("Build", tables=(Table("", _PROPERTIES, tuple(rows)),))


def _layers(document: Document) -> Section:
    if document["layers"] is None:
        return Section("Layers", (f"They cannot be shown on this machine: {document['why_closed']}",))
    rows = [(layer["name"], layer["kind"], ", ".join(layer["types"])) for layer in document["layers"]]
    columns = (*texts("layer", wrap=True), *texts("kind", "types"))
    return Section("Layers", (f"{len(rows):,} layers.",), tables=(Table("", columns, tuple(rows)),))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
