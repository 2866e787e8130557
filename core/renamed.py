"""Keep the former name of an attribute for one release, with a warning."""

from __future__ import annotations

import warnings
from typing import Any


class RenamedAttribute:
    """A class attribute that leads to another attribute of the same object.

    Args:
        today: the present name of the attribute.
    """

    def __init__(self, today: str) -> None:
        self._today = today

    def __set_name__(self, owner: type, name: str) -> None:
        """Note the former name, which is the name of this attribute."""
        self._former = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return the value of the renamed attribute, with a warning."""
        if instance is None:
            return self
        warnings.warn(
            f"{type(instance).__name__}.{self._former} is called {self._today} now; the old name goes with the next "
            "release.",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(instance, self._today)
