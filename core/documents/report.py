"""Define the report that every function at the package's root returns: files, checks, notes and warnings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..spelling import spelled

if TYPE_CHECKING:
    from .sidecar import CheckRecord

# How each outcome of a check is shown.
SIGNS = {"passed": "✓", "failed": "✗", "not proven": "?", "skipped": "-"}


class Report(ABC):
    """Base of all reports; `str(report)` is a readable text of it."""

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
        """What is not proven, one sentence each; empty where everything is."""
        return []

    @property
    def passed(self) -> bool:
        """Whether no check failed; see `checks` and `warnings` for checks that could not decide."""
        return all(check.status != "failed" for check in self.checks)

    @abstractmethod
    def headline(self) -> str:
        """Return one line that says what was done."""

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [spelled(self.headline())]
        for check in self.checks:
            lines.append(f"  {SIGNS[check.status]} {spelled(f'{check.name:<{width}}  {check.detail}')}".rstrip())
        lines += [f"Note: {spelled(line)}" for line in self.notes]
        return "\n".join([*lines, *(f"Warning: {spelled(line)}" for line in self.warnings)])
