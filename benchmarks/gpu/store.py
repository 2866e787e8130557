"""The GPU's results, kept case by case: what was measured survives a run that is stopped, and the next goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..machine import write_document
from .cases import Case

Row = dict[str, Any]
# What must be the same for cases to stand in one document.
_SAME = ("device", "versions", "setting")


@dataclass
class Store:
    """A document and its file.

    Args:
        path: of the document.
        header: of this machine and run: `_SAME`, and the date.
        rows: by case, what was measured.
        rest: the document's other parts.
    """

    path: Path
    header: Row
    rows: dict[Case, Row] = field(default_factory=dict)
    rest: Row = field(default_factory=dict)

    def read(self) -> str:
        """Take up a document that was begun on the same GPU with the same releases; else say why it is not."""
        if not self.path.exists():
            return ""
        document = json.loads(self.path.read_text(encoding="utf-8"))
        other = [part for part in _SAME if document.get(part) != self.header[part]]
        if other:
            return f"{self.path} was measured with another {' and '.join(other)}: it is begun anew."
        names = Case.__dataclass_fields__
        self.rows = {Case(**{name: row[name] for name in names}): row for row in document["cases"]}
        self.rest = {name: document[name] for name in ("checks", "engines") if name in document}
        return f"{self.path} has {len(self.rows)} cases; the others are measured."

    def missing(self, wanted: list[Case]) -> list[Case]:
        """Those that have no row yet."""
        return [case for case in wanted if case not in self.rows]

    def document(self) -> Row:
        """All of it."""
        return {"name": "gpu", **self.header, **self.rest, "cases": list(self.rows.values())}

    def write(self) -> None:
        """Whole or not at all."""
        write_document(self.path, self.document())
