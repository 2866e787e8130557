"""Write any value, name or argument into the text of an error."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable

# The advice wherever a step file is needed.
HOW_TO_EXPORT_STEPS = "Export a step file: localattn export CHECKPOINT --mode step -o model_step.onnx"

# `reprlib` looks at a few entries and levels only: YAML aliases can make a list of billions.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 60, 60


def shown(value: object, limit: int = 60) -> str:
    """Write any value on one line of an error."""
    try:
        text = "null" if value is None else _SHORT.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a nest of thousands of lists
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def close_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Write a fix line that names the closest known name, or lists all of them.

    Args:
        name: what was given.
        known: the allowed names.
        cutoff: the least likeness, of difflib's ratio from 0 to 1.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=cutoff)
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(names)}."


def first_line(error: BaseException, limit: int | None = None) -> str:
    """Return the first line of an error's text, cut to `limit` characters; the error's class where it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0][:limit] if lines else type(error).__name__


def named_line(error: BaseException, limit: int | None = None) -> str:
    """Return an error's class and the first line of its text, cut to `limit` characters."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:limit]}"


# What `argument` writes: `name`, or `name=value`.
_ARGUMENT = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")
_ABSENT = object()


def argument(name: str, value: object = _ABSENT) -> str:
    """Write an argument of the package's functions as in Python: `overwrite=True`, in backticks.

    The command line shows its own spelling (`--force`), which `with_flags` puts in its place.
    """
    return f"`{name}`" if value is _ABSENT else f"`{name}={value!r}`"


def with_flags(text: str, spell: Callable[[str, str | None], str | None]) -> str:
    """Replace every argument that `argument` wrote by another spelling.

    Args:
        text: text of an error.
        spell: returns the spelling of a name and its value, if any; None leaves the text as it is.
    """
    return _ARGUMENT.sub(lambda match: spell(match[1], match[2]) or match[0], text)
