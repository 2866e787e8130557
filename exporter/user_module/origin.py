"""Where a module of the user's own came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.storage.module_places import remember


@dataclass(frozen=True)
class Origin:
    """Where a module came from, for the sidecar.

    Args:
        name: "package.module:function", or the class.
        kwargs: the function's arguments.
        weights: name of the checkpoint, "" without one.
        weights_sha256: SHA-256 of the checkpoint.
        notes: what was chosen while building the module.
        warnings: choices between several sets of weights that nobody made.
        entry: the entry of the checkpoint that was asked for; None where none was.
        folders: where a tokenizer may lie.
        code: the file that defines the function; None without a function.
        code_sha256: SHA-256 of that file as it was run.
        factory: the function by its whole path, as it can be named from any folder.
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weights: str = ""
    weights_sha256: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    entry: str | None = None
    folders: tuple[Path, ...] = ()
    code: Path | None = None
    code_sha256: str = ""
    factory: str = ""


def remember_origin(origin: Origin) -> None:
    """Note in the user's own cache where the code of a module is, so that later comparisons find it."""
    if origin.code is not None:
        note = {"code": str(origin.code), "factory": origin.factory, "folder": str(Path.cwd())}
        remember(origin.code_sha256, origin.name, origin.kwargs, note)
