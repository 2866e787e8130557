"""Records for the checks of a file that `--checks quick` leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from ...core.documents.sidecar import CheckRecord
from ...runtime.parity.inputs import InputSet

# Names of the checks that quick checks leave out; their records are made in several files.
WINDOW = "window"
MEMORY = "linear memory"


def left_out() -> list[CheckRecord]:
    """Return a record for each check that is not run, in the order of the checks."""
    detail = "not run, as the quick checks were asked for"
    return [CheckRecord(name=name, status="skipped", detail=detail) for name in (WINDOW, MEMORY)]


def inputs_of(sets: Iterable[InputSet], quick: bool) -> Iterator[InputSet]:
    """Yield the sets of inputs to compare on: all, or for quick checks only the first."""
    return islice(sets, 1 if quick else None)
