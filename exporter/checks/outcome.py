"""Make records of the four outcomes of a check; the table of checks adds the check's name.

A check that met nothing to check is `not_proven` or `skipped`, with the reason, and never `passed`.
"""

from __future__ import annotations

from ...core.documents.sidecar import CheckRecord

Figure = float | int | str


def passed(detail: str, **figures: Figure) -> CheckRecord:
    """Return the record of a check that ran and found no fault."""
    return CheckRecord(name="", status="passed", detail=detail, figures=figures)


def failed(detail: str, **figures: Figure) -> CheckRecord:
    """Return the record of a check that found a fault."""
    return CheckRecord(name="", status="failed", detail=detail, figures=figures)


def not_proven(reason: str, **figures: Figure) -> CheckRecord:
    """Return the record of a check that could not decide, or had nothing to check."""
    return CheckRecord(name="", status="not proven", detail=reason, figures=figures)


def skipped(reason: str) -> CheckRecord:
    """Return the record of a check that did not run, or whose fault the user accepts."""
    return CheckRecord(name="", status="skipped", detail=reason)
