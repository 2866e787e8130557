"""Note what this process is working on, so that its parent can report a crash and remove leftover files.

The notes are a small document: the files that are read, the temporary folders in use, the outputs that are in their
places, and the exit code once it is known. With `share` they lie in memory that a parent process reads.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmap import mmap

# Two slots of this size: one is read while the other is written. Lists that do not fit are cut.
_SLOT = 1 << 17
_LENGTH = struct.Struct("<I")


@dataclass
class Notes:
    """What a process is working on."""

    inputs: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    verbose: bool = False
    # The exit code, once the command has ended by itself.
    code: int | None = None


_notes = Notes()
_shared: mmap | None = None
_lock = threading.Lock()


def reads(paths: Iterable[Path]) -> None:
    """Note the files that the command was asked to read."""
    _notes.inputs = [str(path) for path in paths]
    _share()


def is_verbose() -> None:
    """Note that details were asked for."""
    _notes.verbose = True
    _share()


def wrote(*outputs: Path) -> None:
    """Note outputs that are already published."""
    _notes.written += [str(path) for path in outputs]
    _share()


def written() -> list[str]:
    """Return the outputs that are already published."""
    return list(_notes.written)


def ends_with(code: int) -> None:
    """Note the exit code of a command that has ended by itself."""
    _notes.code = code
    _share()


@contextmanager
def removed_at_death(folder: Path) -> Iterator[Path]:
    """Note a temporary folder while the block runs; the block removes it."""
    noted = str(folder.absolute())
    _notes.folders.append(noted)
    _share()
    try:
        yield folder
    finally:
        _notes.folders.remove(noted)
        _share()


@contextmanager
def temporary_folder(prefix: str = "localattn-") -> Iterator[Path]:
    """Make a temporary folder; the supervisor removes it even if this process crashes."""
    made = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    with made as name, removed_at_death(Path(name)):
        yield Path(name)


def begin() -> None:
    """Forget what an earlier command in this process noted."""
    _notes.__dict__.update(asdict(Notes()))
    _share()


def shared_memory() -> mmap:
    """Return memory that this process shares with the children it forks."""
    from mmap import mmap

    return mmap(-1, 1 + 2 * _SLOT)


def share(memory: mmap) -> None:
    """Keep the notes of this process in shared memory from now on."""
    global _shared
    _shared = memory
    _share()


def _share() -> None:
    """Write the notes into the unused slot, then switch readers to that slot."""
    if _shared is None:
        return
    with _lock:
        document = asdict(_notes)
        text = json.dumps(document).encode()
        while len(text) > _SLOT - _LENGTH.size:
            for name in ("inputs", "folders", "written"):
                document[name] = document[name][: len(document[name]) // 2]
            text = json.dumps(document).encode()
        slot = 1 - _shared[0]
        start = 1 + slot * _SLOT
        _shared[start : start + _LENGTH.size + len(text)] = _LENGTH.pack(len(text)) + text
        _shared[0] = slot


def read_notes(memory: mmap) -> Notes:
    """Read the notes of a process that shared them; they are empty if it died before its first note."""
    start = 1 + memory[0] * _SLOT
    (length,) = _LENGTH.unpack(memory[start : start + _LENGTH.size])
    if not 0 < length <= _SLOT - _LENGTH.size:
        return Notes()
    try:
        return Notes(**json.loads(memory[start + _LENGTH.size : start + _LENGTH.size + length]))
    except (ValueError, TypeError):
        return Notes()


def remove_left(notes: Notes) -> list[str]:
    """Remove a dead process's temporary folders that no living process uses; return those that could not be removed."""
    for name in notes.folders:
        with _claimed(name) as mine:
            if mine:
                shutil.rmtree(name, ignore_errors=True)
    return [name for name in notes.folders if os.path.lexists(name)]


@contextmanager
def _claimed(folder: str) -> Iterator[bool]:
    """Lock a folder of this user's while the block runs; yield whether it may be removed."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (ImportError, OSError):
        yield False
        return
    try:
        own = os.fstat(descriptor).st_uid == os.geteuid()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            own = False
        except OSError:  # no locks on this file system: the folder's name is this process's alone
            pass
        yield own
    finally:
        os.close(descriptor)
