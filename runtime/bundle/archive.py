"""Write and read bundles as one tar: equal bundles give equal bytes, and readers check all headers first.

Only plain ustar entries are read: files and folders. Links, devices, sparse files, and extension headers that could
rename an entry or claim any size, are refused from the table of contents, before a byte is extracted.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...core.error_texts import argument
from ...core.errors import CheckFailed, UsageError
from ...core.storage.files import publish, work_folder
from ...core.storage.wrong_file import refuse_wrong_file
from .device import check_files
from .device.check_files import MANIFEST, MAX_FILES, MAX_MANIFEST, Fault

_BLOCK = tarfile.BLOCKSIZE
_END = bytes(_BLOCK)


def write_tar(folder: Path, target: Path, top: str) -> None:
    """Pack a folder under the name `top`: sorted, without times and owners.

    Raises:
        UsageError: a name or file too large for the format, or the place cannot be written.
    """
    with work_folder(target) as work:
        staged = work / "bundle.tar"
        try:
            with tarfile.open(staged, "w", format=tarfile.USTAR_FORMAT, encoding="utf-8") as archive:
                for path in sorted(item for item in folder.rglob("*") if item.is_file()):
                    entry = tarfile.TarInfo(f"{top}/{path.relative_to(folder).as_posix()}")
                    entry.size, entry.mode = path.stat().st_size, 0o644
                    with path.open("rb") as stream:
                        archive.addfile(entry, stream)
        except ValueError as error:
            raise UsageError(
                f"Cannot write {target}.", why=str(error), fix=f"Use {argument('format', 'dir')}."
            ) from error
        publish(staged, target)


@dataclass(frozen=True)
class Entry:
    """One file of a tar: its path below the top folder, where its bytes begin, and how many they are."""

    path: str
    offset: int
    size: int


def read_table(path: Path) -> list[Entry]:
    """Return the files of a tar from its headers alone.

    Raises:
        UsageError: it is not a plain tar, or has a forbidden entry; the first one is named.
    """
    refuse_wrong_file(path, tars=False)
    try:
        with path.open("rb") as stream:
            entries = list(_entries(stream, path.stat().st_size))
        tops = {name.split("/")[0] for name, _, _ in entries}
        if len(tops) != 1 or any("/" not in name for name, _, _ in entries):
            raise ValueError("its files are not in one folder")
        check_files.check_paths([name for name, _, _ in entries])
    except OSError as error:
        raise UsageError(f"Cannot read {path}.", why=error.strerror or str(error)) from error
    except (ValueError, tarfile.TarError) as error:
        fix = "Download the bundle again; nothing was extracted."
        raise UsageError(f"{path} is not a bundle.", why=f"The tar is refused: {error}.", fix=fix) from error
    return [Entry(name.split("/", 1)[1], offset, size) for name, offset, size in entries]


def _entries(stream: BinaryIO, total: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of each file."""
    count = 0
    while (header := stream.read(_BLOCK)) != _END:
        if len(header) < _BLOCK:
            raise ValueError("it is cut")
        entry = tarfile.TarInfo.frombuf(header, "utf-8", "strict")  # verifies the header's own checksum
        offset = stream.tell()
        name = entry.name.rstrip("/") if entry.type == tarfile.DIRTYPE else entry.name
        problem = check_files.path_problem(name)
        if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            problem = "is a link, a device or an extension header"
        elif entry.size < 0 or offset + entry.size > total or (entry.type == tarfile.DIRTYPE and entry.size):
            problem = f"states {entry.size} bytes in a tar of {total}"
        count += 1
        if problem or count > 2 * MAX_FILES:
            raise ValueError(f"entry {name[:100]!r} {problem or 'is one of too many'}")
        if entry.type != tarfile.DIRTYPE:
            yield name, offset, entry.size
        stream.seek(offset + -(-entry.size // _BLOCK) * _BLOCK)
    while block := stream.read(1 << 16):
        if block.strip(b"\0"):
            raise ValueError("data follows its end")


def read_tar_manifest(path: Path, table: list[Entry]) -> bytes:
    """Return the bytes of the manifest inside a tar.

    Raises:
        Fault: there is no manifest, or it is too large.
    """
    entry = next((entry for entry in table if entry.path == MANIFEST), None)
    if entry is None or entry.size > MAX_MANIFEST:
        raise Fault(check_files.NO_BUNDLE, f"{path} is not a bundle.", f"{MANIFEST} is missing or too large.")
    return b"".join(_bytes_of(path, entry))


def check_tar(path: Path, table: list[Entry], manifest: dict[str, Any]) -> None:
    """Compare the files inside a tar with the manifest, without extracting them.

    Raises:
        Fault: a file is missing, added or altered.
    """
    found = {entry.path: entry for entry in table}
    sizes = {name: entry.size for name, entry in found.items()}
    check_files.check_listed(manifest, sizes, lambda name: _bytes_of(path, found[name]))


def extract(path: Path, table: list[Entry], folder: Path) -> None:
    """Write the files of a checked tar below `folder`."""
    for entry in table:
        target = folder / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as stream:
            for block in _bytes_of(path, entry):
                stream.write(block)


def _bytes_of(path: Path, entry: Entry) -> Iterator[bytes]:
    with path.open("rb") as stream:
        stream.seek(entry.offset)
        left = entry.size
        while left:
            block = stream.read(min(left, 1 << 20))
            if not block:
                raise CheckFailed(f"{path} became shorter while it was read.")
            left -= len(block)
            yield block
