"""Asynchronous work in groups: started, committed as a group, and waited for until only the latest few are left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Work = TypeVar("Work")


class Groups(Generic[Work]):
    """What was started and not waited for, by group; the last group is not committed."""

    def __init__(self) -> None:
        self._groups: list[list[Work]] = [[]]

    def __iter__(self) -> Iterator[Work]:
        """All that is under way."""
        return (work for group in self._groups for work in group)

    def start(self, work: Work) -> None:
        """Add to the group that is open."""
        self._groups[-1].append(work)

    def commit(self) -> None:
        """Close the group, and open the next."""
        self._groups.append([])

    def wait(self, left: int) -> list[Work]:
        """End all closed groups but the latest `left`; what was in them."""
        ended = max(0, len(self._groups) - 1 - left)
        done = [work for group in self._groups[:ended] for work in group]
        del self._groups[:ended]
        return done
