"""Define the table of checks that run, in this order, before a file is published.

A check of every export is a file in this folder and a row here. Its function takes the written file (`CheckedFile`) and
returns one of the outcomes in `outcome.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from ...core.documents.proof import GOLDEN_CHECK, GRAPH_CHECK, MEMORY_CHECK, ROUNDED_CHECK, WINDOW_CHECK
from ...core.documents.sidecar import PARITY, CheckRecord
from ...runtime.inputs.rows import ROWS, open_batch
from ...runtime.parity.overflow import FP16_RANGE
from .checked_file import CheckedFile, ConvertedFile, ExportedFile, Kind, SequenceFile
from .constants import CONSTANTS
from .loads import check_loads
from .outcome import skipped
from .quality import QUALITY

EVERY: frozenset[Kind] = frozenset({"checkpoint", "steps", "module", "convert"})
EXPORTS: frozenset[Kind] = frozenset({"checkpoint", "steps", "module"})
SEQUENCES: frozenset[Kind] = frozenset({"checkpoint", "module"})
CONVERSIONS: frozenset[Kind] = frozenset({"convert"})

QUICK = "not run in the quick checks"
_BEFORE = "checked before the functions were inlined"


@dataclass(frozen=True)
class Check:
    """A row of the table.

    Args:
        name: what reports call the check.
        run: takes the written file, returns an outcome.
        applies_to: the kinds of export that make the check.
        quick: whether the quick checks make it too.
        accepted_by: the option with which a user accepts the fault; "" if no fault is accepted.
        of_nodes: whether it looks at the attention nodes, which a file in standard operators no longer has.
        where: whether a file of these kinds has what the check is about; a file that has not gets no record.
    """

    name: str
    run: Callable[[Any], CheckRecord]
    applies_to: frozenset[Kind] = EVERY
    quick: bool = True
    accepted_by: str = ""
    of_nodes: bool = False
    where: Callable[[Any], bool] = lambda file: True

    def applies(self, file: CheckedFile) -> bool:
        """Return whether the check applies to a file, ignoring quick checks."""
        return file.kind in self.applies_to and self.where(file)

    def record(self, file: CheckedFile) -> CheckRecord:
        """Run the check on a written file, and return its record."""
        if file.options.quick and not self.quick:
            return self._named(skipped(QUICK))
        file.progress(f"Checking: {self.name}")
        found = self.run(file)
        if self.of_nodes and file.rewritten and found.status != "skipped":
            found = found.model_copy(update={"detail": f"{found.detail}; {_BEFORE}"})
        if found.status == "failed" and self.accepted_by and getattr(file.options, self.accepted_by):
            found = skipped(f"accepted: {found.detail}").model_copy(update={"figures": found.figures})
        return self._named(found)

    def _named(self, record: CheckRecord) -> CheckRecord:
        return record.model_copy(update={"name": self.name})


def _of_kind(method: Callable[[Any], CheckRecord | None]) -> Callable[[Any], CheckRecord]:
    """Return a function that calls this method of a file."""
    return methodcaller(method.__name__)


def _open_batch(file: CheckedFile) -> bool:
    return open_batch(file.session.inputs, file.session.outputs)


CHECKS: tuple[Check, ...] = (
    Check("onnx checker", _of_kind(CheckedFile.valid)),
    Check("onnxruntime loads", check_loads),
    Check("same as its source", _of_kind(ConvertedFile.same), CONVERSIONS),
    Check(
        GOLDEN_CHECK,
        lambda file: file.golden_outputs(file.golden),
        EXPORTS,
        where=lambda file: file.golden is not None,
    ),
    Check(GRAPH_CHECK, _of_kind(ExportedFile.graph), EXPORTS, where=lambda file: file.has_proofs),
    Check(ROUNDED_CHECK, _of_kind(ExportedFile.rounded), EXPORTS, where=lambda file: file.has_proofs),
    Check(PARITY, _of_kind(ExportedFile.parity), EXPORTS),
    Check(FP16_RANGE, _of_kind(ExportedFile.halves), EXPORTS, where=lambda file: file.halves() is not None),
    Check(QUALITY, _of_kind(ExportedFile.quality), EXPORTS, quick=False, where=lambda file: file.has_quality),
    Check(CONSTANTS, _of_kind(ExportedFile.constants), EXPORTS, where=lambda file: file.has_own_constants),
    Check(ROWS, _of_kind(SequenceFile.rows), SEQUENCES, where=_open_batch),
    Check(WINDOW_CHECK, _of_kind(SequenceFile.window), SEQUENCES, quick=False, of_nodes=True),
    Check(
        MEMORY_CHECK,
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
        if check.applies(file):
            yield check.record(file)


def way_to_accept(name: str) -> str:
    """Return the option with which a user accepts the fault that a check found; "" if no fault is accepted."""
    return next((check.accepted_by for check in CHECKS if check.name == name), "")


def names_of(kind: Kind) -> frozenset[str]:
    """Return the names of the checks of a kind of export."""
    return frozenset(check.name for check in CHECKS if kind in check.applies_to)
