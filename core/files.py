"""Writing files so that they appear whole or not at all, and fingerprints of what is on disk.

Work is done in a temporary folder beside its target. Each is locked by the process it belongs to, so that what a
killed process left behind can be told from what another one is using, and is removed by the next that writes there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UsageError
from .reading import open_plain

try:
    import fcntl
except ImportError:  # not on Windows: folders are not locked, and none but one's own is removed
    fcntl = None  # type: ignore[assignment]

_PREFIX = ".localattn-"


def is_file(path: Path) -> bool:
    """Whether a path leads to a plain file; a name that no file can have leads to none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def sha256(path: Path) -> str:
    """SHA-256 of a file as lower-case hex."""
    digest = hashlib.sha256()
    with open_plain(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`; what is `publish`ed from it appears whole.

    The folder is on the same file system as the target, so that the final rename is atomic, and it
    is removed on every way out; after a kill, by the next that writes there.

    Raises:
        UsageError: the target's folder does not exist or cannot be written.
    """
    parent = target.parent
    if not parent.is_dir():
        raise UsageError(f"Cannot write {target}.", why=f"The folder {parent} does not exist.", fix="Create it first.")
    if target.is_dir():
        raise UsageError(f"Cannot write {target}.", why="It is a folder.", fix="Give the path of a file.")
    with work_folder(target) as folder:
        yield folder


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """A locked temporary folder beside `target`, removed on every way out; those of killed processes go first.

    Raises:
        UsageError: the folder that holds `target` cannot be written.
    """
    parent = target.absolute().parent
    remove_abandoned(parent)
    try:
        folder, lock = _locked_folder(parent)
    except OSError as error:
        raise UsageError(f"Cannot write {target}.", why=str(error), fix="Choose another folder.") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int | None]:
    """A new folder, and the open descriptor whose lock ends with this process."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = _lock(folder, wait=True)
        if lock is None or folder.is_dir():
            return folder, lock
        os.close(lock)  # another process took it for abandoned before it was locked


def _lock(folder: Path, *, wait: bool) -> int | None:
    """An open descriptor that holds the folder's lock; None where it is held, or locks do not work."""
    if fcntl is None:
        return None
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return None
    return descriptor


def remove_abandoned(parent: Path) -> None:
    """Remove temporary folders that no living process holds."""
    with contextlib.suppress(OSError):
        for folder in list(parent.glob(f"{_PREFIX}*")):
            if folder.is_symlink() or not folder.is_dir():
                continue
            lock = _lock(folder, wait=False)
            if lock is not None:
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
    """Move a finished file to its place in one atomic step, after its bytes are on disk."""
    flush(staged)
    staged.replace(target)


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Nothing is replaced unasked.

    Raises:
        UsageError: the target exists and may not be overwritten.
    """
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists.", why="Nothing is replaced unasked.", fix="Add --force.")
