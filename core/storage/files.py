"""Write files so that they appear whole or not at all, and compute fingerprints of files.

Work is done in a temporary folder beside its target. Its name follows from the target's, and the process that writes
the target holds its lock. So no two processes write the same file, and what a killed process left behind can be
distinguished from what another one is using; the next process that writes there removes it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from ..at_work import removed_at_death, wrote
from ..errors import UsageError
from .reading import open_plain

_log = logging.getLogger(__name__)

try:
    import fcntl
except ImportError:  # Windows: folders are not locked, and a process removes only its own
    fcntl = None  # type: ignore[assignment]

_PREFIX = ".localattn-"
_NAME = re.compile(re.escape(_PREFIX) + "[0-9a-f]{16}")
# Seconds to wait for a lock, which a process that removes abandoned folders holds for a moment.
_PATIENCE = 1.0
# The folders that this thread holds, by target: nested calls work in the same folder.
_held: ContextVar[Mapping[Path, Path]] = ContextVar("held", default=MappingProxyType({}))
# Checks a target once more right before it is replaced (`core.storage.outputs.reserved` sets it).
last_look: ContextVar[Callable[[Path], None]] = ContextVar("last_look", default=lambda target: None)


def is_file(path: Path) -> bool:
    """Check whether a path leads to a plain file; a name that no file can have leads to none."""
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


@contextmanager
def work_folder(target: Path, *, wait: bool = False) -> Iterator[Path]:
    """Make and lock the temporary folder beside `target`, and remove it on every way out.

    Folders that killed processes left there are removed first.

    It is on the same file system as the target, so that a rename to the target is atomic. Whoever holds it already
    gets the same folder again.

    Args:
        target: the file or folder to write.
        wait: wait until another process has finished with it, instead of raising; for what several replace in turn.

    Raises:
        UsageError: the folder that holds `target` is missing or cannot be written, or another process writes `target`.
    """
    parent = require_parent(target)
    key = parent.resolve() / target.name
    if key in _held.get():
        yield _held.get()[key]
        return
    remove_abandoned(parent)
    try:
        folder, lock = _locked_folder(target, wait)
    except OSError as error:
        raise write_error(target, error) from error
    token = _held.set({**_held.get(), key: folder})
    try:
        with removed_at_death(folder):
            yield folder
    finally:
        _held.reset(token)
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked_folder(target: Path, wait: bool) -> tuple[Path, int | None]:
    """Make a folder, and return it with the open descriptor that holds its lock; None where locks do not work."""
    parent = target.absolute().parent
    folder = parent / (_PREFIX + hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16])
    deadline = time.monotonic() + _PATIENCE
    while fcntl is not None:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            lock = _lock(folder)
        except FileNotFoundError:  # another process has just removed it
            continue
        except BlockingIOError:
            if not wait and time.monotonic() > deadline:
                raise UsageError(
                    f"{target} is being written by another process.",
                    why="Only one can write a file at a time.",
                    fix="Wait until it has finished, or choose another name.",
                ) from None
            time.sleep(0.02)
            continue
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                folder.rmdir()
                break
            raise UsageError(
                f"Cannot write {target}.",
                why=f"{folder} is not a folder of yours.",
                fix="Look at what it is, and remove it.",
            ) from error
        if _same(folder, lock) and not any(folder.iterdir()):
            return folder, lock
        if _same(folder, lock):  # what a killed process left there
            shutil.rmtree(folder)
        os.close(lock)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)), None


def _lock(folder: Path) -> int:
    """Lock a folder of the current user, and return the open descriptor that holds the lock.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it is not such a folder, or locks do not work here.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _same(folder: Path, descriptor: int) -> bool:
    """Check whether the name still leads to the open folder."""
    try:
        return os.path.samestat(folder.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def remove_abandoned(parent: Path) -> None:
    """Remove temporary folders of the current user that no living process holds."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError):
        for folder in [path for path in parent.iterdir() if _NAME.fullmatch(path.name)]:
            with contextlib.suppress(OSError):
                lock = _lock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def flush(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(staged: Path, target: Path) -> None:
    """Move a finished file to its place in one atomic step, after its bytes are on disk.

    Raises:
        UsageError: since the work began, something has appeared there that must stay.
    """
    flush(staged)
    last_look.get()(target)
    staged.replace(target)
    wrote(target)
    _log.info("wrote %s", target)


# What to do about each cause; for any other, the advice is another place.
_REMEDIES = {
    errno.ENOSPC: "Free some space on that disk, or write to another one.",
    errno.EDQUOT: "Free some space, or write to another disk.",
    errno.EFBIG: "Write to a disk that takes files of this size.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
}


def write_error(target: Path, error: OSError) -> UsageError:
    """Return the error to raise where the system refuses to write a target."""
    name = f": {error.filename}" if error.filename else ""
    return UsageError(
        f"Cannot write {target}.",
        why=f"{error.strerror or error}{name}.",
        fix=_REMEDIES.get(error.errno or 0, "Choose another folder, or check its permissions and its disk."),
    )
