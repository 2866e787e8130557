"""A case: the files of a folder, the command to run there, and what it may leave and change."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from .server import Answer

# In planted files: the folder of the case.
HERE = b"@HERE@"
# The tmpfs of a case that fills a disk, and what else lies on it.
DISK, DISK_BYTES = "disk", 2 << 20


@dataclass(frozen=True)
class Folder:
    """An empty folder."""


@dataclass(frozen=True)
class Pipe:
    """A FIFO that nobody writes to."""


@dataclass(frozen=True)
class Socket:
    """A socket of the file system."""


@dataclass(frozen=True)
class HardLink:
    """A second name of an earlier file of the case."""

    target: str


# Bytes are the content of a file, text is the target of a symbolic link.
Content = bytes | str | Folder | Pipe | Socket | HardLink


@dataclass(frozen=True)
class Streams:
    """What a command of its own process is started with.

    Args:
        out: stdout: "pipe" (read to its end), "closed", "full" (/dev/full), or "early": a pipe without a reader.
        err: stderr, likewise.
        nobody: run as a user that the system's list does not have, as containers do, where namespaces allow it.
    """

    out: str = "pipe"
    err: str = "pipe"
    nobody: bool = False


@dataclass(frozen=True)
class Request:
    """A request to end.

    Args:
        number: of the signal.
        after: seconds after the start.
        group: whether the whole process group gets it, as from a terminal.
    """

    number: int
    after: float
    group: bool


# In private files of a case: what may be in nothing that a command prints or leaves.
SECRET = b"SECRET-4b1f0a"
# Behind a line break in forged texts: no line that is shown begins with it.
FORGED = "FORGED-4b1f0a"


@dataclass(frozen=True)
class Case:
    """Files to write into an empty folder, and the command to run in it.

    Args:
        files: by relative path, in order. `@HERE@` in the content of a file stands for the folder.
        arguments: of the command line; `{}` stands for the folder.
        outputs: patterns of what the command may leave in the folder, whole.
        replaced: patterns of what was there and the command was told to replace.
        environment: variables to set, `{}` in them stands for the folder; None removes one.
        modes: permissions by path, set when all is written.
        owners: user id by path; only where the tests run as root.
        free: bytes that are free on the small disk at `disk`; None for no such disk.
        streams: run in a process of its own, with these; None for the worker.
        names_code: the command names the planted library, so it may run.
        answers: of a server, whose address stands for `@SERVER@` in the arguments.
        own_process: run as users do, in a process that another one answers for.
        requests: signals that it gets meanwhile, in a process of its own.
        must_fail: nothing is right there: exit code 0 would be believed.
        seconds: how long it may take by the clock, where it is known; 0 for the limit of every case.
    """

    files: Mapping[str, Content]
    arguments: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)
    owners: Mapping[str, int] = field(default_factory=dict)
    free: int | None = None
    streams: Streams | None = None
    names_code: bool = False
    answers: tuple[Answer, ...] = ()
    own_process: bool = False
    requests: tuple[Request, ...] = ()
    must_fail: bool = False
    seconds: float = 0.0

    def may_leave(self, name: str) -> bool:
        """Whether a new file may be there; never one of ours on its way."""
        return not any(part.startswith(".localattn") for part in name.split("/")) and _matches(name, self.outputs)

    def may_change(self, name: str) -> bool:
        return _matches(name, self.replaced)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def laid_out(case: Case, folder: Path) -> Iterator[list[str]]:
    """Write the files; the arguments with the folder put in. Afterwards the folder can be removed again."""
    with _small_disk(folder, case.free) as room:
        lay_out(case, folder)
        if room is not None:
            _fill(folder / DISK, room)
        for name, owner in case.owners.items():
            if os.geteuid() == 0:
                os.chown(folder / name, owner, owner, follow_symlinks=False)
        for name, mode in case.modes.items():
            (folder / name).chmod(mode)
        try:
            yield filled(case, folder)
        finally:
            for name in case.modes:
                if (folder / name).is_dir():
                    (folder / name).chmod(0o755)


def lay_out(case: Case, folder: Path) -> list[str]:
    """Write the files; the arguments with the folder put in."""
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, content, folder)
    return filled(case, folder)


def filled(case: Case, folder: Path) -> list[str]:
    """The arguments with the folder put in."""
    return [argument.replace("{}", str(folder)) for argument in case.arguments]


def environment(case: Case, folder: Path) -> dict[str, str | None]:
    """The variables with the folder put in."""
    return {
        name: value if value is None else value.replace("{}", str(folder)) for name, value in case.environment.items()
    }


def _write(path: Path, content: Content, folder: Path) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content.replace(HERE, str(folder).encode()))
    elif isinstance(content, str):
        path.symlink_to(content.replace("{}", str(folder)))
    elif isinstance(content, HardLink):
        path.hardlink_to(folder / content.target)
    elif isinstance(content, Pipe):
        os.mkfifo(path)
    elif isinstance(content, Socket):
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket may be 108 bytes long
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path.name)
        finally:
            os.chdir(here)
    else:
        path.mkdir(exist_ok=True)


@contextmanager
def _small_disk(folder: Path, free: int | None) -> Iterator[int | None]:
    """A tmpfs at `disk` where one may be mounted; else a plain folder, which is never full."""
    if free is None:
        yield None
        return
    place = folder / DISK
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield free if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


def _fill(disk: Path, free: int) -> None:
    """Leave so many bytes free."""
    there = os.statvfs(disk)
    with (disk / "filler").open("wb") as stream, contextlib.suppress(OSError):
        stream.write(bytes(max(0, there.f_bavail * there.f_frsize - free)))


Entry = tuple[str, int, int, bytes | str]
# What onnxruntime and torch leave in the user's cache and in the temporary folder begins like this.
_OTHERS = ("Microsoft", ".ses", "torchinductor_")


def of_others(names: Iterable[str]) -> set[str]:
    """Those of the names that other packages make, and the folders above them."""
    found: set[str] = set()
    for path in map(PurePosixPath, names):
        if any(part.startswith(_OTHERS) for part in path.parts):
            found |= {str(path), *(str(parent) for parent in path.parents)}
    return found


def snapshot(folder: Path) -> dict[str, Entry]:
    """Every name below a folder: its kind, permissions, owner, and its content or where it leads."""
    found: dict[str, Entry] = {}
    for root, names, files in os.walk(folder):
        for name in (*names, *files):
            path = Path(root, name)
            found[path.relative_to(folder).as_posix()] = _entry(path)
    return found


def _entry(path: Path) -> Entry:
    there = path.lstat()
    content: bytes | str = b""
    if stat.S_ISLNK(there.st_mode):
        content = str(path.readlink())
    elif stat.S_ISREG(there.st_mode):
        content = path.read_bytes()
    kind = oct(stat.S_IFMT(there.st_mode))
    return kind, stat.S_IMODE(there.st_mode), there.st_uid, content
