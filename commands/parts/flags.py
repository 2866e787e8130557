"""Write arguments of the package's functions as options: `overwrite=True` is --force."""

from __future__ import annotations

import ast

from ...core.error_texts import with_flags

# Arguments whose option has another name, and arguments without an option.
_OPTIONS = {
    "quick": "--checks quick",
    "checkpoint": "CHECKPOINT",
    "function_body": "--no-function-body",
    "inputs": "--load-inputs",
    "model": "MODEL",
    "output": "-o",
    "overwrite": "--force",
}


def in_flags(text: str) -> str:
    """Replace the arguments in an error's text by options."""
    return with_flags(text, flag)


def flag(name: str, value: str | None = None) -> str:
    """Return the option of an argument, with its value where one is given.

    Args:
        name: name of the argument.
        value: as Python writes it; None: only the name.
    """
    if name == "plugin" and value is not None and ("/" in value or value == "'PATH'"):
        name = "plugin_library"  # the command line has an option of its own for a library
    option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
    if value is None or value == "True":
        return option
    if value == "False":
        return option if option.startswith("--no-") else f"--no-{option.removeprefix('--')}"
    return f"{option} {_words(value)}"


def _words(value: str) -> str:
    """Write a value as it is typed: texts without quotes, lists with commas."""
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    return ",".join(map(str, read)) or "none" if isinstance(read, tuple | list) else str(read)
