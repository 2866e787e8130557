"""Write the files of a bundle to a temporary folder, then move it into its place.

The move is one step, so that readers see either the old bundle or the new one.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

from ...core.at_work import wrote
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.files import displaced, folder_of, look_again, sha256
from ...core.storage.open_folder import OpenFolder
from ...core.storage.reading import read_plain
from .archive import read_table, read_tar_manifest
from .device.check_files import MANIFEST, MAX_MANIFEST, Fault

_RENAME_EXCHANGE = 2  # linux/fs.h


class BundleFiles:
    """The files of a bundle that is being written, and the role of each.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._roles: dict[str, str] = {}

    def new(self, path: str, role: str) -> Path:
        """Return where to write a file.

        Raises:
            UsageError: one of that name was written before.
        """
        if path in self._roles:
            raise UsageError(f"Two files of the bundle would have the name {path}.", fix="Rename one of them.")
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        self._roles[path] = role
        return target

    def add(self, path: str, content: bytes, role: str) -> None:
        """Write a file with generated content."""
        self.new(path, role).write_bytes(content)

    def take(self, source: Path, path: str, role: str) -> None:
        """Copy a file's bytes into the bundle, without its times and permissions."""
        if path in self._roles and sha256(source) == self.digest(path):
            return  # weights that two models share
        target = self.new(path, role)
        with source.open("rb") as reading, target.open("xb") as writing:
            shutil.copyfileobj(reading, writing, 1 << 20)
        target.chmod(0o644)

    def digest(self, path: str) -> str:
        """Return the SHA-256 of a file of the bundle."""
        return sha256(self.folder / path)

    def listed(self) -> list[dict[str, Any]]:
        """Return the manifest's entries of the files written so far, in a fixed order."""
        return [
            {"path": path, "size": (self.folder / path).stat().st_size, "sha256": self.digest(path), "role": role}
            for path, role in sorted(self._roles.items())
        ]


def check_bundle(target: Path, *, as_tar: bool, overwrite: bool) -> None:
    """Refuse a place with anything other than an earlier bundle.

    Raises:
        UsageError: an existing bundle may not be replaced, or something else is there.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if as_tar == target.is_dir():
        what = "a folder" if as_tar else "not a folder"
        raise UsageError(f"Cannot write {target}.", why=f"It is {what}.", fix="Choose another name.")
    if not _is_bundle(target, as_tar=as_tar):
        why = "It is a tar, but not a bundle." if as_tar else "It is a folder, but not a bundle."
        raise UsageError(f"{target} is not replaced.", why=why, fix="Choose another name.")
    if not overwrite:
        raise UsageError(
            f"{target} already exists.",
            why="Existing bundles are kept.",
            fix=f"Use {argument('overwrite', True)} to overwrite it.",
        )
    added = "" if as_tar else _added(target)
    if added:
        raise UsageError(
            f"{target} is not replaced.",
            why=f"It contains {added}, which is not a file of the bundle and would be lost.",
            fix="Move it elsewhere, or choose another name.",
        )


def _added(folder: Path) -> str:
    """Return a file in a bundle's folder that its manifest does not list; "" if there is none."""
    files = json.loads(read_plain(folder / MANIFEST, MAX_MANIFEST)).get("files")
    entries = files if isinstance(files, list) else []
    listed = {MANIFEST, *(str(entry.get("path")) for entry in entries if isinstance(entry, dict))}
    for root, folders, names in os.walk(folder):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
        # A link to a folder is listed among the folders, and not followed.
        links = [name for name in folders if Path(root, name).is_symlink()]
        for path in (Path(root, name).relative_to(folder).as_posix() for name in [*names, *links]):
            if path not in listed:
                return path
    return ""


def _is_bundle(path: Path, *, as_tar: bool) -> bool:
    """Return whether a folder or a tar has the manifest of a bundle; an empty tar counts as one."""
    if as_tar and path.stat().st_size == 0:
        return True
    try:
        text = read_tar_manifest(path, read_table(path)) if as_tar else read_plain(path / MANIFEST, MAX_MANIFEST)
        return bool(json.loads(text)["format"] == "localattn-bundle")
    except (UsageError, Fault, OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def put_folder(folder: Path, target: Path) -> None:
    """Move a finished folder to its place in one step; remove an earlier bundle there.

    Args:
        folder: in a temporary folder next to `target` (`core.storage.outputs.writing`).
        target: nothing, an empty folder, or an earlier bundle.

    Raises:
        UsageError: something else is there now; it is kept.
    """
    with folder_of(folder) as work, folder_of(target) as parent:
        _flush(work, folder.name)
        look_again(target, parent)
        if not parent.holds(target.name):
            _give_name(work, folder.name, parent, target)
            return
        earlier = "old"
        if _exchange(work, folder.name, parent, target.name):
            wrote(target)
            earlier = folder.name  # the old bundle is now in the temporary folder, and is removed with it
        else:
            # Without the exchange there is a moment with no bundle, but never one with half of it.
            parent.move(target.name, work, earlier)
            try:
                _give_name(work, folder.name, parent, target)
            except OSError:
                work.move(earlier, parent, target.name)
                raise
        try:  # nobody else can change it in the temporary folder
            check_bundle(folder.with_name(earlier), as_tar=False, overwrite=True)
        except UsageError as error:
            if earlier != folder.name or not _exchange(work, earlier, parent, target.name):
                parent.move(target.name, work, "new")
                work.move(earlier, parent, target.name)
            raise UsageError(
                f"{target} is not replaced.",
                why="Another program put something else in its place at the last moment.",
                fix="Choose a folder that only you can write to.",
            ) from error


def _give_name(work: OpenFolder, name: str, parent: OpenFolder, target: Path) -> None:
    if not work.move(name, parent, target.name):
        raise displaced(target)
    wrote(target)


def _flush(parent: OpenFolder, name: str) -> None:
    """Flush a folder and every file in it to disk before it gets its name."""
    folder = parent.open(name)
    try:
        for below in folder.names():
            if stat.S_ISDIR(folder.stat(below).st_mode):
                _flush(folder, below)
            else:
                folder.flush(below)
        folder.flush()
    finally:
        folder.close()


def _exchange(one: OpenFolder, name: str, other: OpenFolder, its_name: str) -> bool:
    """Swap two folders in one step; return False if the system cannot."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    places = (one.descriptor, os.fsencode(name), other.descriptor, os.fsencode(its_name))
    return bool(rename(*places, _RENAME_EXCHANGE) == 0)
