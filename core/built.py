"""Libraries that were built on this machine: what all kinds share of finding them and of trusting their facts.

Paths are kept in the order they were built, one list for each kind.

Libraries built without `-o` lie in `$XDG_CACHE_HOME/localattn/plugins/<arch>` (`~/.cache` without the variable). Those
built elsewhere are in the lists all the same, so that every library built on this machine is found again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from .errors import CheckFailed, LocalAttnError, UsageError
from .files import publish, sha256, staging
from .publishing import sidecar_path

_MOST_REMEMBERED = 100
Facts = TypeVar("Facts")


def cache_folder() -> Path:
    """The folder of all libraries that were built without a path."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "localattn", "plugins")


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
    return [path for path in paths if path.is_file() and sidecar_path(path).is_file()]


def readable(kind: str, read: Callable[[Path], Facts]) -> Iterator[Facts]:
    """What `read` tells of each of them, the newest first, without those of which it cannot."""
    for path in reversed(remembered(kind)):
        try:
            facts = read(path)
        except (LocalAttnError, OSError):
            continue  # removed or replaced by something else since
        yield facts


def facts_beside(library: Path, how_to_build: str) -> Path:
    """Where the facts of a library lie.

    Raises:
        UsageError: there is no library, or no facts beside it.
    """
    facts = sidecar_path(library)
    for file in (library, facts):
        if not file.is_file():
            raise UsageError(f"{file} is missing.", fix=f"Build a library with: {how_to_build}")
    return facts


def check_digest(library: Path, stated: str, how_to_build: str) -> None:
    """A library must be the one its facts were written for.

    Raises:
        CheckFailed: its SHA-256 is not the stated one.
    """
    if sha256(library) != stated:
        raise CheckFailed(
            f"{library} was changed after it was built.",
            why="Its SHA-256 is not the one in the file beside it.",
            fix=f"Build it again: {how_to_build} --force",
        )


def fingerprint_of(sources: Iterable[Path]) -> str:
    """Digest of files by name and content: what a library is made from, to tell those of other releases apart."""
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _index(kind: str) -> Path:
    return cache_folder() / f"{kind}.json"
