"""Write values and names into the texts of errors, whatever they are."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

# It looks at a few entries and levels only: YAML aliases can make a list of billions.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 60, 60


def shown(value: object, limit: int = 60) -> str:
    """Write a value on one line of an error, whatever it is."""
    try:
        text = "null" if value is None else _SHORT.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a nest of thousands of lists
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def close_match(name: str, known: Iterable[str]) -> str:
    """Write a fix line that names the known name that `name` was probably meant to be, or lists all."""
    names = sorted(known)
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.6)
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(names)}."
