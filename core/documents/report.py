"""Define the report that every function at the package's root returns: files, checks, notes and warnings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..spelling import spelled

if TYPE_CHECKING:
    from .sidecar import CheckRecord

# The four outcomes of a check, and the sign that shows each.
SIGNS = {"passed": "✓", "failed": "✗", "not proven": "?", "skipped": "-"}


def count_outcomes(statuses: Iterable[str]) -> dict[str, int]:
    """Count how often each of the four outcomes occurs."""
    given = list(statuses)
    return {status: given.count(status) for status in SIGNS}


def outcomes_text(statuses: Iterable[str]) -> str:
    """Count the outcomes of checks in words: "5 passed, 0 failed, 1 not proven, 0 skipped"."""
    return ", ".join(f"{count} {status}" for status, count in count_outcomes(statuses).items())


class Report(ABC):
    """Base of all reports: `str(report)` is a readable text, `bool(report)` is False if a check failed."""

    notes: list[str]

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """The files that were written, the main one first."""

    @property
    @abstractmethod
    def checks(self) -> Sequence[CheckRecord]:
        """The checks that were made, the most interesting first."""

    @property
    def warnings(self) -> list[str]:
        """What is not proven, one sentence each; empty if everything is proven."""
        return []

    @property
    def passed(self) -> bool:
        """Whether no check failed; see `checks` and `warnings` for checks that could not decide."""
        return all(check.status != "failed" for check in self.checks)

    @property
    def outcomes(self) -> dict[str, int]:
        """How many checks had each of the four outcomes."""
        return count_outcomes(check.status for check in self.checks)

    def __bool__(self) -> bool:
        """Return `passed`: checks that are not proven or skipped leave a report true."""
        return self.passed

    def __repr__(self) -> str:
        """Return the headline, and whether all checks passed."""
        return f"<{type(self).__name__}: {spelled(self.headline())}; {outcomes_text(x.status for x in self.checks)}>"

    @abstractmethod
    def headline(self) -> str:
        """Return one line that says what was done."""

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [spelled(self.headline())]
        for check in self.checks:
            outcome = "" if check.status == "passed" else f"{check.status.upper()}: "
            told = spelled(f"{check.name:<{width}}  {outcome}{check.detail}")
            lines.append(f"  {SIGNS[check.status]} {told}".rstrip())
        lines += [f"  {outcomes_text(check.status for check in self.checks)}"] if self.checks else []
        lines += [f"Note: {spelled(line)}" for line in self.notes]
        return "\n".join([*lines, *(f"Warning: {spelled(line)}" for line in self.warnings)])
