"""Make the parts of a page that describe a model: signature, windows, sidecar and checks.

They read the JSON that commands print (`TensorSpec`, `WindowView`, `Sidecar` and `CheckRecord` as JSON types), so that
every format shows the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..core.documents.report import outcomes_text
from ..core.documents.window_view import WindowView
from .figures import cosine, figure
from .page import Chart, Section
from .svg.window import chosen_query, reach_picture, shown, single_positions, window_picture
from .table import Mark, Table, numbers, texts

Document = Mapping[str, Any]

_MARKS: Mapping[str, Mark] = {"failed": "bad", "not proven": "unsure", "skipped": "unsure"}
# The entries of a sidecar that are shown, in this order; the rest has tables of its own.
_SIDECAR = (
    ("class", "Class"),
    ("checkpoint_name", "Checkpoint"),
    ("created", "Exported"),
    ("dtype", "Element type"),
    ("seq_len", "Tokens a sequence"),
    ("batch", "Sequences a call"),
    ("dynamic", "Dynamic axes"),
    ("opset", "Opset"),
    ("function_body", "Attention in standard operators"),
    ("standard_ops", "Standard operators only"),
    ("hyper_connections", "Hyper-connections"),
    ("external_data", "External weights"),
    ("options", "Notes of the export"),
    ("kwargs", "Arguments"),
    ("versions", "Versions"),
    ("checkpoint_sha256", "SHA-256 of the checkpoint"),
    ("model_sha256", "SHA-256 of the file"),
)


def signature_table(document: Document) -> Table:
    """Make the table of inputs and outputs."""
    rows = [
        (kind, spec["name"], spec["dtype"], "[" + ", ".join(map(str, spec["shape"])) + "]")
        for kind, specs in (("input", document["inputs"]), ("output", document["outputs"]))
        for spec in specs
    ]
    return Table("", texts("", "name", "type", "shape"), tuple(rows))


def checks_table(checks: Sequence[Document]) -> Table:
    """Make the table of checks, one row per check, with its figures."""
    rows = [
        (
            check["name"],
            check["status"] if check["status"] == "passed" else check["status"].upper(),
            check["detail"],
            ", ".join(f"{name} {_check_figure(check, name)}" for name in check["figures"]),
        )
        for check in checks
    ]
    columns = (*texts("check", "result"), *texts("found", "figures", wrap=True))
    return Table("", columns, tuple(rows), marks=tuple(_MARKS.get(check["status"], "") for check in checks))


def _check_figure(check: Document, name: str) -> str:
    passed = check["status"] != "failed"
    return cosine(check["figures"][name], passed) if name == "cosine" else figure(check["figures"][name])


def checks_text(checks: Sequence[Document]) -> str:
    """Say how many checks had each outcome."""
    if not checks:
        return "no checks were run"
    return f"of {len(checks)} checks {outcomes_text(check['status'] for check in checks)}"


def sidecar_section(sidecar: Document, title: str) -> Section:
    """Make the section with the properties of an export; its checks have another section."""
    rows = [(label, _told(sidecar[key])) for key, label in _SIDECAR if sidecar.get(key) not in (None, "", [], {})]
    tables = [Table("", texts("property", "value", wrap=True), tuple(rows))]
    if sidecar.get("layers"):
        layers = [
            (layer["path"], layer["class"], "replaced" if layer["replaced"] else "left as it is", layer["detail"])
            for layer in sidecar["layers"]
        ]
        columns = (*texts("layer", "class", ""), *texts("window, or why", wrap=True))
        tables.append(Table("Layers of the module", columns, tuple(layers)))
    return Section(title, tables=tuple(tables))


def window_section(view: WindowView, title: str) -> Section:
    """Describe what queries see, in words and as a table."""
    length = (
        f"{view.length:,} positions" if view.length else f"the length is dynamic, {view.sequence:,} positions are shown"
    )
    count = f"{view.depth} layer{'s' * (view.depth > 1)}"
    rows = [
        (f"{e.query:,}", interval(e.first, e.end), f"{e.end - e.first:,}", interval(e.deep_first, e.deep_end))
        for e in view.examples()
    ]
    kind = "keys with a learned bias" if view.biases else "keys"
    columns = numbers("query", kind, "how many", f"through {count}")
    note = "The keys of one layer, and the inputs that can change the output at the query through all layers."
    layers = ", ".join(view.layers[:6]) + (f" and {len(view.layers) - 6} more" if len(view.layers) > 6 else "")
    text = f"{view.describe()[:1].upper()}{view.describe()[1:]}. {count[:1].upper()}{count[1:]} ({layers}); {length}."
    return Section(title, (text,), partial(_window_charts, view), (Table("", columns, tuple(rows), (note,)),))


def _window_charts(view: WindowView) -> list[Chart]:
    """Draw which keys queries see, and how far the last (or the middle) one sees through the layers."""
    example = view.example(chosen_query(view))
    keys = f"{interval(example.first, example.end)} ({example.end - example.first:,})"
    pointed = f"Highlighted: query {example.query:,} sees keys {keys}."
    charts = [Chart(window_picture(view), f"{_filled(view)} ({_part(view)}). {pointed}")]
    if view.depth > 1 and not view.biases:
        query = view.sequence - 1 if view.geometry.causal else view.sequence // 2
        charts.append(Chart(reach_picture(view, query), f"Inputs that query {query:,} sees through the layers."))
    return charts


def _filled(view: WindowView) -> str:
    if not view.biases:
        return "Filled: a visible key"
    others = "the earlier ones" if view.geometry.causal else "the others"
    return f"Filled: a key with a learned bias; {others} count too, with bias 0"


def _part(view: WindowView) -> str:
    size = shown(view)
    part = f"{size:,} positions"
    if view.length and size < view.length:
        part = f"the first {size:,} of {view.length:,} positions"
    return part if single_positions(view) or view.biases else f"{part}; lines at the windows' edges"


def windows_of(document: Document) -> dict[str, WindowView]:
    """Read the views that a document contains, by their headings."""
    views = [WindowView.from_dict(saved) for saved in document["windows"]]
    return {"Window" if len(views) == 1 else f"Window {n} of {len(views)}": view for n, view in enumerate(views, 1)}


def interval(first: int, end: int) -> str:
    """Write the positions from `first` up to, and without, `end`."""
    return f"{first:,}" if end - first == 1 else f"{first:,} to {end - 1:,}"


def _told(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(
            f"{name} = {item if isinstance(item, str) else json.dumps(item)}" for name, item in value.items()
        )
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
