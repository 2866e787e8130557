"""Find what differs in one type of Hugging Face models: each such type has a file here, named after it.

The name is `model_type` of config.json, with `_` for `-`. The file ends in `QUIRKS`, an instance of its subclass of
`Quirks`. `qwen2_text` uses `qwen2.py`, unless there is a `qwen2_text.py`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ..quirks import Quirks

# Ends of names of types whose code lies in the folder of the type without it, in transformers too.
_PARTS = ("_text", "_encoder")


def module_names(model_type: object) -> list[str]:
    """List the modules that may hold a type, here and in transformers: its own, then that of the type it is part of."""
    name = str(model_type).replace("-", "_")
    return list(dict.fromkeys((name, *(name.removesuffix(end) for end in _PARTS))))


@cache
def known() -> frozenset[str]:
    """Return the names of the files in this folder."""
    return frozenset(module.name for module in iter_modules(__path__))


def quirks_of(model_type: object) -> Quirks:
    """Return the quirks of a type.

    Args:
        model_type: of its configuration. A folder may state anything: only the files of this folder are imported.
    """
    name = next((name for name in module_names(model_type) if name in known()), None)
    if name is None:
        return Quirks()
    found: Quirks = import_module(f".{name}", __name__).QUIRKS
    return found
