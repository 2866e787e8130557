"""The table of checks: what is checked before a file is published, in this order.

A check of every export is a file in this folder and a row here. Its function takes the written file (`CheckedFile`) and
returns one of the outcomes in `outcome.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from ...core.documents.proof import GOLDEN_CHECK
from ...core.documents.sidecar import PARITY, WINDOW, CheckRecord
from ...runtime.inputs.rows import ROWS
from .checked_file import CheckedFile, ConvertedFile, ExportedFile, Kind, SequenceFile
from .loads import check_loads, check_model
from .outcome import skipped

EVERY: frozenset[Kind] = frozenset({"checkpoint", "steps", "module", "convert"})
EXPORTS: frozenset[Kind] = frozenset({"checkpoint", "steps", "module"})
SEQUENCES: frozenset[Kind] = frozenset({"checkpoint", "module"})
CONVERSIONS: frozenset[Kind] = frozenset({"convert"})

QUICK = "not run, as the quick checks were asked for"
_BEFORE = "seen before the functions were inlined"


@dataclass(frozen=True)
class Check:
    """A row of the table.

    Args:
        name: what reports call the check.
        run: takes the written file, returns an outcome; None where the file has nothing of the kind.
        applies_to: the kinds of export that make the check.
        quick: whether the quick checks make it too.
        accepted_by: the option with which a user accepts the fault; "" if no fault is accepted.
        of_nodes: whether it looks at the attention nodes, which a file in standard operators no longer has.
    """

    name: str
    run: Callable[[Any], CheckRecord | None]
    applies_to: frozenset[Kind] = EVERY
    quick: bool = True
    accepted_by: str = ""
    of_nodes: bool = False

    def record(self, file: CheckedFile) -> CheckRecord | None:
        """Run the check on a written file, and return its record; None where it does not apply."""
        if file.options.quick and not self.quick:
            return self._named(skipped(QUICK))
        file.progress(f"Checking: {self.name}")
        found = self.run(file)
        if found is None:
            return None
        if self.of_nodes and file.rewritten and found.status != "skipped":
            found = found.model_copy(update={"detail": f"{found.detail}; {_BEFORE}"})
        if found.status == "failed" and self.accepted_by and getattr(file.options, self.accepted_by):
            found = skipped(f"allowed: {found.detail}").model_copy(update={"figures": found.figures})
        return self._named(found)

    def _named(self, record: CheckRecord) -> CheckRecord:
        return record.model_copy(update={"name": self.name})


def _of_kind(method: Callable[[Any], CheckRecord | None]) -> Callable[[Any], CheckRecord | None]:
    """Return a function that calls the method of this name of a file's own kind."""
    return methodcaller(method.__name__)


CHECKS: tuple[Check, ...] = (
    Check("onnx checker", lambda file: check_model(file.path)),
    Check("onnxruntime loads", check_loads),
    Check("same as its source", _of_kind(ConvertedFile.same), CONVERSIONS),
    Check(GOLDEN_CHECK, _of_kind(ExportedFile.golden_outputs), EXPORTS),
    Check(PARITY, _of_kind(ExportedFile.parity), EXPORTS),
    Check(ROWS, _of_kind(SequenceFile.rows), SEQUENCES),
    Check(WINDOW, _of_kind(SequenceFile.window), SEQUENCES, quick=False, of_nodes=True),
    Check(
        "linear memory",
        _of_kind(SequenceFile.memory),
        SEQUENCES,
        quick=False,
        accepted_by="allow_quadratic",
        of_nodes=True,
    ),
    Check("no wide integers", _of_kind(ExportedFile.integers), EXPORTS, accepted_by="allow_wide_integers"),
)


def run_checks(file: CheckedFile) -> Iterator[CheckRecord]:
    """Run each check that applies to a written file, and yield its record."""
    for check in CHECKS:
        if file.kind in check.applies_to and (record := check.record(file)) is not None:
            yield record


def names_of(kind: Kind) -> frozenset[str]:
    """Return the names of the checks of a kind of export."""
    return frozenset(check.name for check in CHECKS if kind in check.applies_to)
