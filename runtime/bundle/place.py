"""Move a finished folder into its place in one step, so that readers see either the old bundle or the new one."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.files import flush
from ...core.storage.reading import read_plain
from .archive import read_table, read_tar_manifest
from .device.check_files import MANIFEST, MAX_MANIFEST, Fault

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h


def check_bundle(target: Path, *, as_tar: bool, overwrite: bool) -> None:
    """Refuse a place that holds anything but an earlier bundle or nothing.

    Raises:
        UsageError: something is there and may not be replaced, or it is no bundle.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if as_tar == target.is_dir():
        what = "a folder" if as_tar else "not a folder"
        raise UsageError(f"Cannot write {target}.", why=f"It is {what}.", fix="Choose another name.")
    if not _is_bundle(target, as_tar=as_tar):
        why = "It is a tar of other things." if as_tar else "It is a folder that holds other things than a bundle."
        raise UsageError(f"{target} is not replaced.", why=why, fix="Choose another name.")
    if not overwrite:
        raise UsageError(
            f"{target} exists.", why="Nothing is replaced unasked.", fix=f"Add {argument('overwrite', True)}."
        )
    added = "" if as_tar else _added(target)
    if added:
        raise UsageError(
            f"{target} is not replaced.",
            why=f"It holds {added}, which is no file of the bundle and would be lost.",
            fix="Move it elsewhere, or choose another name.",
        )


def _added(folder: Path) -> str:
    """Return a file that lies in the folder of a bundle and that its manifest does not list; "" if there is none."""
    files = json.loads(read_plain(folder / MANIFEST, MAX_MANIFEST)).get("files")
    entries = files if isinstance(files, list) else []
    listed = {MANIFEST, *(str(entry.get("path")) for entry in entries if isinstance(entry, dict))}
    for root, folders, names in os.walk(folder):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
        # A link to a folder is listed among the folders, and not walked into.
        links = [name for name in folders if Path(root, name).is_symlink()]
        for path in (Path(root, name).relative_to(folder).as_posix() for name in [*names, *links]):
            if path not in listed:
                return path
    return ""


def _is_bundle(path: Path, *, as_tar: bool) -> bool:
    """Return whether a folder or a tar has the manifest of a bundle; an empty tar is taken for one."""
    if as_tar and path.stat().st_size == 0:
        return True
    try:
        text = read_tar_manifest(path, read_table(path)) if as_tar else read_plain(path / MANIFEST, MAX_MANIFEST)
        return bool(json.loads(text)["format"] == "localattn-bundle")
    except (UsageError, Fault, OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def put_folder(folder: Path, target: Path) -> None:
    """Put a finished folder in its place, in one step; an earlier one there is removed.

    Args:
        folder: in a temporary folder beside `target`.
        target: nothing, an empty folder, or an earlier bundle.
    """
    _flush(folder)
    if target.is_dir() and any(target.iterdir()):
        if _exchange(folder, target):
            return  # the old bundle is in the temporary folder now and is removed with it
        # Without the exchange there is a moment with no bundle, but never one with half of it.
        target.rename(folder.parent / "old")
    folder.rename(target)


def _flush(folder: Path) -> None:
    """Flush every file to disk before the folder gets its name."""
    for root, _, names in os.walk(folder):
        for path in (Path(root), *(Path(root) / name for name in names)):
            flush(path)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; return False where the system cannot."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
