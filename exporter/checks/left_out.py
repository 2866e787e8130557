"""Make the records of the checks that quick checks leave out; several files make them."""

from __future__ import annotations

from functools import partial

from ...core.documents.sidecar import CheckRecord

window_record = partial(CheckRecord, name="window")
memory_record = partial(CheckRecord, name="linear memory")


def left_out() -> list[CheckRecord]:
    """Return a record for each check that is not run, in the order of the checks."""
    detail = "not run, as the quick checks were asked for"
    return [record(status="skipped", detail=detail) for record in (window_record, memory_record)]
