"""Read and extend a file of kernel times, which several builds may share at once.

Each build reads the file when it begins and measures into a copy of its own. When it ends, it waits for the file's
lock, reads it again, adds what is in it now to its own times, and puts the sum in its place in one step. So no build
loses what another one measured meanwhile, and a reader sees a whole file at any time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .....core.errors import LocalAttnError, UsageError
from .....core.storage.file_kinds import TIMING_CACHE
from .....core.storage.files import publish, work_folder
from .....core.storage.outputs import Output, check_outputs
from .....core.storage.reading import read_plain
from ..library import TensorRTLibrary

# Timing caches have a few megabytes: times of kernels, no kernels.
_LARGEST = 1 << 30


def stage(opened: TensorRTLibrary, builder: Any, path: Path, folder: Path) -> Path:
    """Copy a timing cache into a build's own folder, where the build extends it.

    Args:
        opened: the library.
        builder: a `Builder` of it.
        path: the file, which need not exist.
        folder: of this build.

    Returns:
        The copy; it exists where the file does.

    Raises:
        UsageError: the file is of another kind, this release cannot read it, or its folder cannot be written. It stays
            as it is.
    """
    copy = folder / "timing.cache"
    with work_folder(path, wait=True):
        content = _read(path)
    if content is None:
        return copy
    opened.messages.clear()
    if builder.create_builder_config().create_timing_cache(content) is None:
        raise UsageError(
            f"{opened.library.name} {opened.version} cannot read the timing cache {path}.",
            why=opened.messages.reason(),
            fix="Name another file: each release writes its own.",
        )
    copy.write_bytes(content)
    return copy


def extend(builder: Any, path: Path, times: bytes) -> list[str]:
    """Add the times of a build to a timing cache.

    Args:
        builder: a `Builder` of the library that measured.
        path: the file; it is made if there is none.
        times: the build's own timing cache, with what it read in the beginning.

    Returns:
        What the user should know: why the file was left as it is, if it was. The engine is finished in any case.
    """
    try:
        with work_folder(path, wait=True) as folder:
            there = _read(path)
            merged = folder / "timing.cache"
            merged.write_bytes(times if there is None else combined(builder, times, there))
            publish(merged, path)
    except (LocalAttnError, OSError) as error:
        return [f"The times were not added to {path}: {error}"]
    return []


def combined(builder: Any, first: bytes, second: bytes) -> bytes:
    """Return one timing cache with the entries of two; where both have one, the first one's.

    Raises:
        UsageError: TensorRT cannot read one of them, or does not combine them.
    """
    config = builder.create_builder_config()
    caches = [config.create_timing_cache(content) for content in (first, second)]
    # Entries that another GPU measured are kept: TensorRT tells them apart itself.
    if None in caches or not caches[0].combine(caches[1], True):
        raise UsageError("TensorRT does not combine both caches.", fix="Name another file for the timing cache.")
    return bytes(caches[0].serialize())


def _read(path: Path) -> bytes | None:
    """Return a timing cache's bytes; None if there is no file.

    Raises:
        UsageError: it is of another kind, or cannot be read.
    """
    check_outputs([Output(path, TIMING_CACHE)])
    try:
        content = read_plain(path, _LARGEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"Cannot read {path}.", why=f"{error.strerror}.", fix="Name another file.") from error
    if len(content) > _LARGEST:
        raise UsageError(f"{path} is too large for a timing cache.", fix="Name another file.")
    return content
