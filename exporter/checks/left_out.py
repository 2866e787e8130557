"""The checks of a file that `--checks quick` leaves out: their records, which are made in several files."""

from __future__ import annotations

from functools import partial

from ...core.documents.sidecar import CheckRecord

window_record, memory_record = (partial(CheckRecord, name=name) for name in ("window", "linear memory"))


def left_out() -> list[CheckRecord]:
    """Return a record for each check that is not run, in the order of the checks."""
    detail = "not run, as the quick checks were asked for"
    return [record(status="skipped", detail=detail) for record in (window_record, memory_record)]
