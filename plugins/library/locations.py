"""Where plugin libraries go, and which was built last (`core/built.py` keeps the list)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...core import built
from ...core.built import cache_folder as cache_folder
from ..kernel.spec import KernelSpec
from ..kernel.targets import Target
from .facts import Arch, LibraryFacts, read_facts
from .fingerprint import fingerprint

LIBRARY_NAME = "liblocalattn_plugin.so"
_KIND = "libraries"


def default_path(arch: Arch, models: list[Path]) -> Path:
    """Where a library goes when no path is given: one name for the full set, one for each set of models."""
    name = LIBRARY_NAME
    if models:
        name = f"liblocalattn_plugin-{'-'.join(model.stem for model in models)[:80]}.so"
    return cache_folder() / arch / name


def remember(library: Path) -> None:
    """Note that a library was built now."""
    built.remember(_KIND, library)


def built_libraries() -> list[LibraryFacts]:
    """Facts of every library that was built on this machine and is still there, the newest first."""
    return list(_readable())


def _readable() -> Iterator[LibraryFacts]:
    return built.readable(_KIND, lambda path: read_facts(path, verify=False))


def find_library(
    arch: Arch, specs: list[KernelSpec] | None = None, targets: list[Target] | None = None
) -> LibraryFacts | None:
    """The newest library for a processor; None if there is none.

    With `specs`, one that has these kernels for these GPUs, and has them as this release makes them.

    Raises:
        CheckFailed: the library was changed after it was built.
    """
    for facts in _readable():
        if facts.arch != arch or facts.path is None:
            continue
        if specs is None or (facts.fingerprint == fingerprint() and not facts.missing(specs, targets or [])):
            return read_facts(facts.path)
    return None
