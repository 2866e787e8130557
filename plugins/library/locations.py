"""Where built libraries are kept, and which was built last.

Libraries built without `-o` lie in `$XDG_CACHE_HOME/localattn/plugins/<arch>` (`~/.cache` without the variable). Those
built elsewhere are remembered in `libraries.json` there, so that every library built on this machine is found again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ...core.errors import LocalAttnError
from ...core.files import publish, staging
from ..kernel.spec import KernelSpec
from ..kernel.targets import Target
from .facts import Arch, LibraryFacts, facts_path, read_facts
from .fingerprint import fingerprint

LIBRARY_NAME = "liblocalattn_plugin.so"
_MOST_REMEMBERED = 100


def cache_folder() -> Path:
    """The folder of all plugin libraries that were built without a path."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "localattn", "plugins")


def default_path(arch: Arch, models: list[Path]) -> Path:
    """Where a library goes when no path is given: one name for the full set, one for each set of models."""
    name = LIBRARY_NAME
    if models:
        name = f"liblocalattn_plugin-{'-'.join(model.stem for model in models)[:80]}.so"
    return cache_folder() / arch / name


def remember(library: Path) -> None:
    """Note that a library was built now."""
    index = _index()
    index.parent.mkdir(parents=True, exist_ok=True)
    paths = [path for path in _remembered() if path != library.resolve()] + [library.resolve()]
    with staging(index) as folder:
        staged = folder / index.name
        staged.write_text(json.dumps([str(path) for path in paths[-_MOST_REMEMBERED:]], indent=2) + "\n")
        publish(staged, index)


def built_libraries() -> list[LibraryFacts]:
    """Facts of every library that was built on this machine and is still there, the newest first."""
    found = []
    for path in reversed(_remembered()):
        try:
            found.append(read_facts(path, verify=False))
        except (LocalAttnError, OSError):
            continue  # removed or replaced by something else since
    return found


def find_library(
    arch: Arch, specs: list[KernelSpec] | None = None, targets: list[Target] | None = None
) -> LibraryFacts | None:
    """The newest library for a processor; None if there is none.

    With `specs`, one that has these kernels for these GPUs, and has them as this release makes them.

    Raises:
        CheckFailed: the library was changed after it was built.
    """
    for facts in built_libraries():
        if facts.arch != arch or facts.path is None:
            continue
        if specs is None or (facts.fingerprint == fingerprint() and not facts.missing(specs, targets or [])):
            return read_facts(facts.path)
    return None


def _index() -> Path:
    return cache_folder() / "libraries.json"


def _remembered() -> list[Path]:
    """Paths in the order they were built."""
    try:
        entries = json.loads(_index().read_text())
    except (OSError, ValueError):
        return []
    paths = [Path(entry) for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []
    return [path for path in paths if path.is_file() and facts_path(path).is_file()]
