"""Make a configuration to complete, with the known arguments and a placeholder for each unknown one.

A placeholder is text that no argument accepts; the error for a configuration that still has one names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...core.storage.file_kinds import CONFIGURATION, configs_beside
from ...core.storage.files import publish
from ...core.storage.outputs import Output, writing
from ..models.registry import ClassEntry
from .traceless import MEANINGS, default_in_words, traceless_arguments

_OPEN, _CLOSE = "<fill in: ", ">"
_RELEASE = "release of hyper-connections in training, as 0.4.11; or remove this entry for any since 0.3.10"
_ABOUT = "Replace each <fill in: …>; what is shown by the weights need not stand here."


def config_template(
    entry: ClassEntry, known: Mapping[str, Any], inferred: Mapping[str, Any], release: str | None
) -> dict[str, Any]:
    """Return a configuration with the known arguments, and a placeholder for each unknown one that no tensor shows.

    Args:
        entry: the class.
        known: arguments that a configuration or the checkpoint itself gives.
        inferred: arguments inferred from the weights; they are left out.
        release: release of hyper-connections, if it is known.
    """
    values = {**inferred, **known}
    kwargs = {name: value for name, value in known.items() if name not in inferred}
    for name in traceless_arguments(entry, values):
        if name not in values:
            kwargs[name] = _placeholder(entry, name)
    document: dict[str, Any] = {"class": entry.name, "kwargs": kwargs}
    if values.get("num_residual_streams", 1) != 1:
        document["hyper_connections"] = release or f"{_OPEN}{_RELEASE}{_CLOSE}"
    return {"about": _ABOUT, **document} if placeholders(document) else document


def _placeholder(entry: ClassEntry, name: str) -> str:
    default = default_in_words(entry, name)
    # No model works without a window, so it must always be given.
    unsaid = "" if default is None or name == entry.family.window_argument else f"; or remove this entry for {default}"
    return f"{_OPEN}{MEANINGS[name]}{unsaid}{_CLOSE}"


def placeholders(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a configuration that are still placeholders, by name."""
    kwargs = document.get("kwargs")
    entries = {**(kwargs if isinstance(kwargs, Mapping) else {}), "class": document.get("class")}
    entries["hyper_connections"] = document.get("hyper_connections")
    return {str(name): value for name, value in entries.items() if isinstance(value, str) and _OPEN.strip() in value}


def template_text(document: Mapping[str, Any]) -> str:
    """Write a configuration as the text of its file."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def template_path(checkpoint: Path) -> Path:
    """Return the path at which a checkpoint's configuration is found by default."""
    return configs_beside(checkpoint)[0]


def write_template(document: Mapping[str, Any], checkpoint: Path, found: Path | None) -> Path:
    """Write a configuration beside its checkpoint, and return its path.

    Args:
        document: the configuration.
        checkpoint: the weights.
        found: the configuration that the checkpoint has already, if any.

    Raises:
        UsageError: a configuration exists (it is never replaced), or the folder cannot be written.
    """
    path = template_path(checkpoint)
    existing = found if found is not None else path if path.exists() or path.is_symlink() else None
    if existing is not None:
        raise UsageError(
            f"{existing} is there already.",
            why="A configuration is never replaced.",
            fix="Complete that file, or move it away first.",
        )
    with writing(Output(path, CONFIGURATION), inputs=[checkpoint]) as folder:
        staged = folder / path.name
        staged.write_text(template_text(document), encoding="utf-8")
        publish(staged, path)
    return path
