"""Write files whole or not at all, and compute fingerprints of files.

Work is done in a temporary folder next to its target. Its name follows from the target's, and the process that writes
the target holds its lock. So no two processes write the same file, and what a killed process left behind can be
distinguished from what another one is using; the next process that writes there removes it. All is done by the open
descriptors of both folders (`core/storage/open_folder.py`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

from ..at_work import removed_at_death, wrote
from ..errors import UsageError
from .open_folder import HAS_DESCRIPTORS, OpenFolder
from .reading import open_plain

_log = logging.getLogger(__name__)

try:
    import fcntl
except ImportError:  # Windows: folders are not locked, and a process removes only its own
    fcntl = None  # type: ignore[assignment]
HAS_LOCKS = fcntl is not None and HAS_DESCRIPTORS

_PREFIX = ".localattn-"
_NAME = re.compile(re.escape(_PREFIX) + "[0-9a-f]{16}")
# Seconds to wait for a lock, which a process that removes abandoned folders holds for a moment.
_PATIENCE = 1.0
# How often a new folder may be removed or replaced before it is locked, until this process gives up.
_MOST_LOST = 1000
# An empty file in a temporary folder: made first and removed last.
MARK = ".localattn"
# The folders that this thread holds, by target: nested calls work in the same folder.
_held: ContextVar[Mapping[Path, _Work]] = ContextVar("held", default=MappingProxyType({}))
# Checks a target once more right before it is replaced (`core.storage.outputs.reserved` sets it).
last_look: ContextVar[Callable[[Path], None]] = ContextVar("last_look", default=lambda target: None)


def is_file(path: Path) -> bool:
    """Check whether a path leads to a regular file; an impossible name does not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as lower-case hex."""
    with open_plain(path) as stream:
        return sha256_of(stream)


def sha256_of(stream: BinaryIO) -> str:
    """Return the SHA-256 of the rest of a stream, as lower-case hex."""
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def require_parent(target: Path) -> Path:
    """Return the folder that holds a target.

    Raises:
        UsageError: it does not exist.
    """
    parent = target.absolute().parent
    if not os.path.isdir(parent):  # noqa: PTH112 (`Path.is_dir` raises where a name is too long)
        raise UsageError(f"Cannot write {target}.", why=f"The folder {parent} does not exist.", fix="Create it first.")
    return parent


class _Work(NamedTuple):
    """A temporary folder that this thread holds.

    Args:
        way: the path that files in it are written by.
        folder: the folder.
        parent: the folder that holds the target.
    """

    way: Path
    folder: OpenFolder
    parent: OpenFolder


@contextmanager
def work_folder(target: Path, *, wait: bool = False) -> Iterator[Path]:
    """Make and lock the temporary folder next to `target`, and always remove it at the end.

    Folders that killed processes left there are removed first.

    It is on the same file system as the target, so that a rename to the target is atomic, and open to its owner alone.
    Where others can rename it, the path leads through its open descriptor. Whoever holds it already gets the same
    folder again.

    Args:
        target: the file or folder to write.
        wait: wait until another process has finished with it, instead of raising; for what several replace in turn.

    Raises:
        UsageError: the folder that holds `target` is missing or cannot be written, or another process writes `target`.
    """
    parent = require_parent(target)
    held = _held_for(target)
    if held is not None:
        yield held.way
        return
    with ExitStack() as stack:
        try:
            above = stack.enter_context(OpenFolder.opened(parent))
            _remove_abandoned(above)
            folder = _locked_folder(target, above, wait)
        except OSError as error:
            raise write_error(target, error) from error
        stack.callback(folder.close)
        work = _Work(folder.way_in(), folder, above)
        token = _held.set({**_held.get(), **dict.fromkeys(_keys(target), work)})
        try:
            with removed_at_death(folder.path):
                yield work.way
        finally:
            _held.reset(token)
            folder.clear(last=MARK)
            with contextlib.suppress(OSError):
                above.remove_folder(folder.path.name)


def _keys(target: Path) -> tuple[Path, Path]:
    """Return a target as spelled, and the path that it leads to; look up the spelling first, as links may change."""
    return target.absolute(), target.absolute().parent.resolve() / target.name


def _held_for(target: Path) -> _Work | None:
    held = _held.get()
    return next((held[key] for key in _keys(target) if key in held), None)


@contextmanager
def folder_of(path: Path) -> Iterator[OpenFolder]:
    """Give the folder of a file, as it was opened at the start if this thread opened it."""
    work = _held_for(path)
    if work is not None:
        yield work.parent
        return
    work = next((work for work in _held.get().values() if path.parent == work.way), None)
    if work is not None:
        yield work.folder
        return
    with OpenFolder.opened(path.absolute().parent) as folder:
        yield folder


def _locked_folder(target: Path, parent: OpenFolder, wait: bool) -> OpenFolder:
    """Make a folder that is locked by its descriptor; where locks do not work, a folder with a unique name."""
    name = _PREFIX + hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]
    deadline, lost = time.monotonic() + _PATIENCE, 0
    while HAS_LOCKS:
        lost += 1
        if lost > _MOST_LOST:
            raise _not_ours(target, parent.path / name)
        with contextlib.suppress(FileExistsError):
            parent.make(name)
        try:
            folder = _lock(parent, name)
        except FileNotFoundError:  # another process has just removed it
            continue
        except BlockingIOError:
            if not wait and time.monotonic() > deadline:
                raise UsageError(
                    f"{target} is being written by another process.",
                    why="Only one process can write a file at a time.",
                    fix="Wait until it has finished, or choose another name.",
                ) from None
            lost = 0
            time.sleep(0.02)
            continue
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                parent.remove_folder(name)
                break
            raise _not_ours(target, parent.path / name) from error
        try:
            if not _is_at(folder, parent, name):
                pass  # removed or replaced between the two
            elif is_marked(folder):  # what a killed process left there
                folder.clear(last=MARK)
                parent.remove_folder(name)
            elif not _is_private_and_empty(folder):
                raise _not_ours(target, parent.path / name)
            else:
                folder.add(MARK)
                return folder
        except BaseException:
            folder.close()
            raise
        folder.close()
    while True:
        name = _PREFIX + secrets.token_hex(12)
        with contextlib.suppress(FileExistsError):
            parent.make(name)
            break
    folder = parent.open(name)
    if not _is_private_and_empty(folder):
        folder.close()
        raise _not_ours(target, parent.path / name)
    return folder


def _not_ours(target: Path, folder: Path) -> UsageError:
    return UsageError(
        f"Cannot write {target}.", why=f"{folder} is not your folder.", fix="Look at its contents, and remove it."
    )


def _lock(parent: OpenFolder, name: str) -> OpenFolder:
    """Open and lock a folder of the current user.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it is not such a folder, or locks do not work here.
    """
    folder = parent.open(name)
    try:
        if folder.stat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", name)
        assert folder.descriptor is not None
        fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        folder.close()
        raise
    return folder


def _is_private_and_empty(folder: OpenFolder) -> bool:
    """Let only the owner access an empty folder, where the file system keeps modes; return whether it is still empty.

    The mark of a group (setgid), which the files in it inherit, stays.
    """
    if folder.names():
        return False
    mode = stat.S_IMODE(folder.stat().st_mode)
    if folder.descriptor is not None and mode & 0o077:
        with contextlib.suppress(OSError):
            os.fchmod(folder.descriptor, mode & ~0o077)
    return not folder.names()


def _is_at(folder: OpenFolder, parent: OpenFolder, name: str) -> bool:
    """Check whether the name still leads to the open folder."""
    try:
        return os.path.samestat(parent.stat(name), folder.stat())
    except FileNotFoundError:
        return False


def is_marked(folder: OpenFolder) -> bool:
    """Return whether this package made a folder, by a file of this user that nobody else could have put there.

    Whoever can write to the folder above can give any folder there the name of a temporary one.
    """
    try:
        mark = folder.stat(MARK)
    except OSError:
        return False
    return stat.S_ISREG(mark.st_mode) and mark.st_uid == os.geteuid() and mark.st_size == 0


def remove_abandoned(parent: Path) -> None:
    """Remove temporary folders of the current user that no living process holds."""
    with contextlib.suppress(OSError), OpenFolder.opened(parent) as folder:
        _remove_abandoned(folder)


def _remove_abandoned(parent: OpenFolder) -> None:
    if not HAS_LOCKS:
        return
    with contextlib.suppress(OSError):
        for name in [name for name in parent.names() if _NAME.fullmatch(name)]:
            with contextlib.suppress(OSError):
                folder = _lock(parent, name)
                try:
                    if is_marked(folder):
                        folder.clear(last=MARK)
                    parent.remove_folder(name)  # fails unless it is empty
                finally:
                    folder.close()


def publish(staged: Path, target: Path) -> None:
    """Move a finished file to its place in one atomic step, after its bytes are on disk.

    Raises:
        UsageError: since the work began, something has appeared there that must stay, or its folder was replaced.
    """
    with folder_of(staged) as source, folder_of(target) as place:
        source.flush(staged.name)
        look_again(target, place)
        if not source.move(staged.name, place, target.name):
            raise displaced(target)
    wrote(target)
    _log.info("wrote %s", target)


def look_again(target: Path, place: OpenFolder) -> None:
    """Check a target once more right before it is replaced in an open folder.

    Raises:
        UsageError: something has appeared there that must stay, or the path leads to another folder by now.
    """
    last_look.get()(target)
    if not place.is_at(target.absolute().parent):
        raise UsageError(
            f"Cannot write {target}.",
            why="Its folder was replaced during the work.",
            fix="Choose a folder that nobody else can write to.",
        )


def displaced(target: Path) -> UsageError:
    """Return the error for an output that was replaced as soon as it was written."""
    return UsageError(
        f"{target} was replaced as soon as it was written.",
        why="Another user or program wrote to its folder.",
        fix="Choose a folder that only you can write to.",
    )


# Advice for each cause; for any other cause, the advice is another folder.
_REMEDIES = {
    errno.ENOSPC: "Free some space on that disk, or write to another one.",
    errno.EDQUOT: "Free some space, or write to another disk.",
    errno.EFBIG: "Choose a disk that supports files of this size.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
}


def write_error(target: Path, error: OSError) -> UsageError:
    """Return the error for a target that the system refuses to write."""
    name = f": {error.filename}" if error.filename and not str(error.filename).startswith("/proc/") else ""
    return UsageError(
        f"Cannot write {target}.",
        why=f"{error.strerror or error}{name}.",
        fix=_REMEDIES.get(error.errno or 0, "Choose another folder, or check its permissions and its disk."),
    )
