"""The types of Hugging Face models that differ from the others, one file each, found by the name of the type.

A file is named as `model_type` in config.json, with `_` for `-`, and ends in `QUIRKS`, an instance of its subclass of
`Quirks`. A type that transformers derives from another one (`gemma3_text`) takes that one's file if it has none.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ..quirks import Quirks

# Ends of names of types whose code lies in the folder of the type without it, in transformers too.
_PARTS = ("_text", "_encoder")


def module_names(model_type: object) -> list[str]:
    """List the names of modules that may hold a type: its own, then that of the type which it is a part of."""
    name = str(model_type).replace("-", "_")
    return list(dict.fromkeys((name, *(name.removesuffix(end) for end in _PARTS))))


@cache
def known() -> frozenset[str]:
    """Return the names of the files in this folder."""
    return frozenset(module.name for module in iter_modules(__path__))


def quirks_of(model_type: object) -> Quirks:
    """Return what a type differs in.

    Args:
        model_type: of its configuration. A folder may state anything: only the files of this folder are imported.
    """
    name = next((name for name in module_names(model_type) if name in known()), None)
    if name is None:
        return Quirks()
    found: Quirks = import_module(f".{name}", __name__).QUIRKS
    return found
