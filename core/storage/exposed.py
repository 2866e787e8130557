"""Find out whether another user of this machine could change or replace a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_MOST_LINKS = 40  # Linux follows at most this many


def why_exposed(path: Path) -> str:
    """Say in a sentence how another user could change or replace a file; "" if only its owner and root can.

    The file, its folder and every folder above must belong to this user or to root and be writable by nobody else.
    Access lists (ACL) that let others write appear in the group's bits of the mode, so they count.

    One exception: a folder with the sticky bit, such as /tmp, may be writable by others if the path goes on in it to
    a *folder* of this user or of root, because then only these can rename or remove it. Others may hard-link
    a file or a symbolic link into a sticky folder, never a folder.

    Symbolic links on the way are followed one at a time, each checked like a folder; the file itself must not be one.

    Systems without user ids, such as Windows, are not checked.

    Raises:
        OSError: the file or a folder is not there, or cannot be looked at.
    """
    if not hasattr(os, "geteuid"):
        return ""
    trusted = {0, os.geteuid()}
    here, links = Path(path.absolute().anchor), 0
    left = list(path.absolute().parts[1:])
    state = here.lstat()
    while True:
        if state.st_uid not in trusted:
            return f"{here} belongs to another user (uid {state.st_uid})."
        if not left:
            return f"{here} can be written by others (mode {_mode(state)})." if _open_to_others(state) else ""
        name = left.pop(0)
        if name == "..":
            here = here.parent
            state = here.lstat()
            continue
        below = here / name
        found = below.lstat()
        sheltered = bool(state.st_mode & stat.S_ISVTX) and found.st_uid in trusted and stat.S_ISDIR(found.st_mode)
        if _open_to_others(state) and not sheltered:
            return f"{here} can be written by others (mode {_mode(state)})."
        if not stat.S_ISLNK(found.st_mode):
            here, state = below, found
            continue
        links += 1
        if not left or links > _MOST_LINKS or found.st_uid not in trusted:
            return f"{below} is a symbolic link."
        target = below.readlink()
        left[:0] = target.parts[1:] if target.is_absolute() else target.parts
        if target.is_absolute():
            here = Path(target.anchor)
            state = here.lstat()


def link_of_another(path: Path) -> Path | None:
    """Find a symbolic link in a file's path that another user than this one or root made; None if there is none.

    Raises:
        OSError: a folder on the way cannot be looked at.
    """
    if not hasattr(os, "geteuid"):
        return None
    trusted, links = {0, os.geteuid()}, 0
    here, left = Path(path.absolute().anchor), list(path.absolute().parts[1:-1])
    while left:
        below = here / left.pop(0)
        found = below.lstat()
        if not stat.S_ISLNK(found.st_mode):
            here = below if below.name != ".." else here.parent
            continue
        links += 1
        if found.st_uid not in trusted or links > _MOST_LINKS:
            return below
        target = below.readlink()
        left[:0] = target.parts[1:] if target.is_absolute() else target.parts
        here = Path(target.anchor) if target.is_absolute() else here
    return None


def _open_to_others(state: os.stat_result) -> bool:
    return bool(state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _mode(state: os.stat_result) -> str:
    return f"{stat.S_IMODE(state.st_mode):04o}"
