"""Find the library of compiled kernels that was built last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....core.errors import MissingDependency

if TYPE_CHECKING:
    from ....core.machine.processor import Arch
    from ....core.storage.library_store import Library, LibraryKind


def newest(kind: LibraryKind, arch: Arch) -> Library:
    """Return the library of a kind in the cache that was built last for a processor.

    Raises:
        MissingDependency: there is none.
        CheckFailed: others can write it, or it was changed after it was built.
    """
    from ....core.storage.library_store import CPU_KERNELS, find
    from ....plugins.library.sidecar import find_library

    if kind is CPU_KERNELS:
        title, library = "library of CPU kernels", find(kind, arch=arch, this_release=False)
    else:
        title, library = kind.title, find_library(arch)
    if library is None:
        raise MissingDependency(
            f"There is no {title} for {arch} in your cache.",
            why="A library is put into the cache only when built without --output; it may also have been removed.",
            fix=f"Build one with: {kind.how_to_build} --arch {arch}",
        )
    return library
