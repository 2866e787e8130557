"""What the peers' benchmark has measured so far, kept cell by cell: stopping it, or a crash, loses one cell.

Cells go to `<name>_partial.json` among the results of this processor. When the whole grid is there, it becomes
`<name>.json`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..machine import own_result, result_path, write_result
from .grid import Cell

Row = dict[str, Any]
# What must be the same for cells to stand in one table.
_SAME = ("machine", "versions")


@dataclass
class Store:
    """Rows by cell.

    Args:
        name: of the result.
        whole: the cells that complete it.
        rows: what is known so far.
    """

    name: str
    whole: list[Cell]
    rows: dict[Cell, Row] = field(default_factory=dict)

    @property
    def _partial(self) -> str:
        return f"{self.name}_partial"

    def read(self) -> Row | None:
        """The document to go on from: the partial one, else the complete one; None without either."""
        for name in (self._partial, self.name):
            document = own_result(name)
            if document is not None:
                self.rows = {Cell.of(row): row for row in document["cells"]}
                return document
        return None

    def missing(self, wanted: Iterable[Cell]) -> list[Cell]:
        """Those that have no row yet."""
        return [cell for cell in wanted if cell not in self.rows]

    def noisy(self, share: float) -> list[Cell]:
        """Those measured while others took more than this share of the processors."""
        return [cell for cell, row in self.rows.items() if (row["others_cpu"] or 0) > share]

    @property
    def complete(self) -> bool:
        """Whether every cell has its row."""
        return not self.missing(self.whole)

    def ordered(self) -> list[Row]:
        """The rows in the grid's order."""
        return [self.rows[cell] for cell in self.whole if cell in self.rows]

    def add(self, cell: Cell, row: Row, header: Row) -> None:
        """Keep a cell's row and write all of them, with entries about the whole."""
        self.rows[cell] = row
        write_result(self._partial, header | {"cells": self.ordered()})

    def publish(self, header: Row) -> Row:
        """Write what is known under the name it belongs to, and return it as a document."""
        document = header | {"cells": self.ordered()}
        name = self.name if self.complete else self._partial
        write_result(name, document)
        if self.complete:
            result_path(self._partial).unlink(missing_ok=True)
        published = own_result(name)
        assert published is not None, "it was written just now"
        return published


def differing(document: Row, now: Row) -> list[str]:
    """What machine or versions a document was measured with and are others now, in words."""
    found = []
    for part in _SAME:
        for name in sorted(document[part].keys() | now[part].keys()):
            before, after = (side[part].get(name) for side in (document, now))
            if before != after:
                found.append(f"{name}: {before} then, {after} now")
    return found
