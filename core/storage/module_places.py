"""Remember where the code of exported modules lies, for the user who exported them.

A sidecar names the function that made a module, and the digest of its code. Code that only a sidecar names is never
run, because sidecars come from anywhere. Each export therefore notes in the user's own cache which function was run,
with which arguments, and where its code lies. A note counts only while the code is unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .library_store import cache_folder

_MAX_BYTES = 1 << 20


def _path(code_sha256: str, name: str, kwargs: Mapping[str, Any]) -> Path | None:
    """Return where the note of a function with these arguments lies; None without a cache folder."""
    folder = cache_folder()
    if folder is None or not code_sha256:
        return None
    text = json.dumps([code_sha256, name, kwargs], sort_keys=True, default=str)
    return folder.parent / "modules" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def remember(code_sha256: str, name: str, kwargs: Mapping[str, Any], note: Mapping[str, str]) -> None:
    """Note that the user ran a function; without a cache folder, or where it cannot be written, nothing is noted.

    Args:
        code_sha256: digest of the file that defines the function.
        name: the function, as the user named it.
        kwargs: its arguments.
        note: what to remember.
    """
    path = _path(code_sha256, name, kwargs)
    if path is None:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(dict(note), stream)
        staged.replace(path)
    except OSError:
        return


def recall(code_sha256: str, name: str, kwargs: Mapping[str, Any]) -> dict[str, str] | None:
    """Return what was noted of a function; None where nothing was, or where others can write the notes."""
    path = _path(code_sha256, name, kwargs)
    if path is None:
        return None
    try:
        for place in (path.parent, path):
            found = place.lstat()
            if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
                return None
        text = path.read_bytes()[: _MAX_BYTES + 1]
        note = json.loads(text) if len(text) <= _MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    whole = isinstance(note, dict) and all(isinstance(value, str) for value in note.values())
    return note if whole else None
