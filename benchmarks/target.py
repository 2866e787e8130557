"""A figure and the most it may be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """What is asked of a measured value.

    Args:
        what: the figure in words.
        value: as measured.
        limit: the most it may be.
    """

    what: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """As it is stored."""
        rounded = {"value": round(self.value, 4), "limit": round(self.limit, 4)}
        return {**asdict(self), **rounded, "met": self.met}
