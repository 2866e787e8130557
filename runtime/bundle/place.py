"""Putting a finished folder in its place in one step: whoever looks sees the old bundle or the new one."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...core.errors import UsageError
from ...core.files import flush, work_folder
from ...core.reading import read_plain
from .device.check_files import MANIFEST, MAX_MANIFEST

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a place that holds anything but an earlier bundle or nothing, before any work is done.

    Raises:
        UsageError: no such parent folder, something is there and may not be replaced, or it is no bundle.
    """
    if not target.parent.is_dir():
        why = f"The folder {target.parent} does not exist."
        raise UsageError(f"Cannot write {target}.", why=why, fix="Create it first.")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UsageError(f"Cannot write {target}.", why="It is not a folder.", fix="Choose another name.")
    if not target.exists() or not any(target.iterdir()):
        return
    if not _is_bundle(target):
        why = "It is a folder that holds other things than a bundle."
        raise UsageError(f"{target} is not replaced.", why=why, fix="Choose another name.")
    if not overwrite:
        raise UsageError(f"{target} exists.", why="Nothing is replaced unasked.", fix="Add --force.")


def _is_bundle(folder: Path) -> bool:
    try:
        manifest = json.loads(read_plain(folder / MANIFEST, MAX_MANIFEST))
        return bool(manifest["format"] == "localattn-bundle")
    except (UsageError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, put in its place if the block ends well and removed if not.

    Raises:
        UsageError: the parent cannot be written.
    """
    with work_folder(target) as work:
        folder = work / "bundle"
        folder.mkdir()
        try:
            yield folder
            _flush(folder)
            _put(folder, target, work)
        except OSError as error:
            raise UsageError(f"Cannot write {target}.", why=str(error), fix="Check the disk's space.") from error


def _flush(folder: Path) -> None:
    """Every byte to the disk before the folder gets its name."""
    for root, _, names in os.walk(folder):
        for path in (Path(root), *(Path(root) / name for name in names)):
            flush(path)


def _put(folder: Path, target: Path, work: Path) -> None:
    if target.is_dir() and any(target.iterdir()):
        if _exchange(folder, target):
            return  # the old bundle is in `work` now and goes with it
        # Without the exchange there is a moment with no bundle at all, never one with half of it.
        target.rename(work / "old")
    folder.rename(target)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the system cannot."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
