"""Judge a written file by the records of its checks: the first that failed refuses it, with advice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from ...core.documents.proof import GOLDEN_CHECK
from ...core.documents.sidecar import PARITY, CheckRecord
from ...core.error_texts import argument
from ...core.errors import CheckFailed
from ...core.machine.resident_memory import release_memory
from ...runtime.parity.comparison import how_to_accept
from ..lowering.quantize.weights import WEIGHT_KINDS
from ..options import FileOptions
from .table import way_to_accept

_log = logging.getLogger(__name__)

# What to do about a failed check.
_REPORT = "Run again with -v for more, or report the model's configuration."


def demand(
    records: Iterable[CheckRecord],
    options: FileOptions,
    precision: str,
    mapped: Path | None,
    remedy: Callable[[], str] = lambda: "",
) -> list[CheckRecord]:
    """Run checks one after the other, and return their records, that of golden outputs first.

    The memory of each check, and the pages of the checkpoint `mapped`, are released before the next one. `options` and
    `precision`, an entry of `core.tolerance`, are those of the file, for the advice; `remedy` says which other option
    would pass.

    Raises:
        CheckFailed: a check failed; the later ones are not run.
    """
    passed = []
    for record in records:
        release_memory(mapped)
        _log.info("check %s: %s: %s", record.name, record.status, record.detail)
        if record.status == "failed":
            raise CheckFailed(
                f"The exported file failed its check: {record.name}.",
                why=record.detail,
                fix=f"Nothing was written. {_advice(record, options, precision, remedy)}",
            )
        passed.append(record)
    return sorted(passed, key=lambda record: record.name != GOLDEN_CHECK)


def _advice(record: CheckRecord, options: FileOptions, precision: str, remedy: Callable[[], str]) -> str:
    """Say what to do about a failed check."""
    accepted_by = way_to_accept(record.name)
    if accepted_by:
        return f"To accept this, add {argument(accepted_by, True)}."
    if record.name != PARITY:
        return _REPORT
    kind = WEIGHT_KINDS.get(precision)
    other = "" if kind is None else f"{remedy() or kind.instead} "
    return other + how_to_accept([record.figures], options.tolerance(precision))
