"""Which libraries were built on this machine: paths in the order they were built, one list for each kind.

Libraries built without `-o` lie in `$XDG_CACHE_HOME/localattn/plugins/<arch>` (`~/.cache` without the variable). Those
built elsewhere are in the lists all the same, so that every library built on this machine is found again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from .files import publish, staging

_MOST_REMEMBERED = 100


def cache_folder() -> Path:
    """The folder of all libraries that were built without a path."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "localattn", "plugins")


def facts_path(library: Path) -> Path:
    """Where the facts of `library` lie: `liblocalattn.so` → `liblocalattn.so.json`."""
    return library.with_name(library.name + ".json")


def remember(kind: str, library: Path) -> None:
    """Note that a library was built now; `kind` names the list, "libraries"."""
    index = _index(kind)
    index.parent.mkdir(parents=True, exist_ok=True)
    paths = [path for path in remembered(kind) if path != library.resolve()] + [library.resolve()]
    with staging(index) as folder:
        staged = folder / index.name
        staged.write_text(json.dumps([str(path) for path in paths[-_MOST_REMEMBERED:]], indent=2) + "\n")
        publish(staged, index)


def remembered(kind: str) -> list[Path]:
    """The libraries that are still there, and have their facts beside them, in the order they were built."""
    try:
        entries = json.loads(_index(kind).read_text())
    except (OSError, ValueError):
        return []
    paths = [Path(entry) for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []
    return [path for path in paths if path.is_file() and facts_path(path).is_file()]


def _index(kind: str) -> Path:
    return cache_folder() / f"{kind}.json"
