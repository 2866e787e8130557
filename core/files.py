"""Writing files so that they appear whole or not at all, and fingerprints of what is on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UsageError


def sha256(path: Path) -> str:
    """SHA-256 of a file as lower-case hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`; what is `publish`ed from it appears whole.

    The folder is on the same file system as the target, so that the final rename is atomic, and it
    is removed on every way out.

    Raises:
        UsageError: the target's folder does not exist or cannot be written.
    """
    parent = target.parent
    if not parent.is_dir():
        raise UsageError(f"Cannot write {target}.", why=f"The folder {parent} does not exist.", fix="Create it first.")
    if target.is_dir():
        raise UsageError(f"Cannot write {target}.", why="It is a folder.", fix="Give the path of a file.")
    try:
        folder = Path(tempfile.mkdtemp(prefix=".localattn-", dir=parent))
    except OSError as error:
        raise UsageError(f"Cannot write {target}.", why=str(error), fix="Choose another folder.") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(staged: Path, target: Path) -> None:
    """Move a finished file to its place in one atomic step, after its bytes are on disk."""
    descriptor = os.open(staged, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    staged.replace(target)


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Nothing is replaced unasked.

    Raises:
        UsageError: the target exists and may not be overwritten.
    """
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists.", why="Nothing is replaced unasked.", fix="Add --force.")
