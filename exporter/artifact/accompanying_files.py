"""Copy files that belong to a model in a folder, such as its tokenizer, into the exported file's folder."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from ...core.at_work import wrote
from ...core.errors import UsageError
from ...core.storage.files import folder_of, is_file, look_again, sha256, write_error
from ...core.storage.open_folder import OpenFolder
from ...core.storage.reading import open_plain, read_plain

# The size limit of `tokenizer.json` (docs/robustness.md).
MAX_BYTES = 128 << 20
# The largest tokenizers have a few million values; parsing one needs about 60 bytes of memory.
_MOST_VALUES = 1 << 23
_TEXTS = (".json", ".jinja", ".txt")


def check_accompanying_files(folder: Path, names: Sequence[str], output: Path) -> list[Path]:
    """Return the files of a folder that will be copied into an output's folder: those that are not there yet.

    Args:
        folder: the model's folder.
        names: files that belong to a model, where it has them.
        output: the file to write.

    Raises:
        UsageError: another file of one of these names lies there, which is never replaced; or one of the folder is a
            link out of it, not a regular file, too large, or not the JSON or text that its name says.
    """
    found = []
    for source in (folder / name for name in names):
        if not os.path.lexists(source):
            continue
        check_inside(source, folder)
        try:
            content = read_plain(source, MAX_BYTES)
        except OSError as error:
            raise _unusable(source, f"{error.strerror or error}.") from error
        check_content(source, content)
        place = output.with_name(source.name)
        if not os.path.lexists(place):
            found.append(source)
        elif not is_file(place) or sha256(place) != hashlib.sha256(content).hexdigest():
            raise UsageError(
                f"{place} is not replaced.",
                why=f"It differs from the {source.name} of {folder}, which must be copied next to {output.name}.",
                fix="Choose another folder for the output.",
            )
    return found


def check_inside(source: Path, folder: Path) -> None:
    """Refuse a file that is a link out of its folder.

    In a cache of the Hugging Face Hub, `models--O--N/snapshots/R/`, files are links to `models--O--N/blobs/`.

    Raises:
        UsageError: it leads elsewhere, or nowhere.
    """
    if not source.is_symlink():
        return
    try:
        real, inside = source.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise _unusable(source, "It is a link that leads nowhere.") from error
    within = [inside, *(above.parent / "blobs" for above in inside.parents if above.name == "snapshots")]
    if not any(place in real.parents for place in within):
        raise _unusable(
            source, f"It is a link to {real}, outside {folder}, which would be copied to the output's folder."
        )


def check_content(source: Path, content: bytes) -> None:
    """Refuse a file whose contents do not fit its name: JSON in UTF-8, or text in UTF-8.

    Raises:
        UsageError: it is too large, no UTF-8, or no JSON.
    """
    if len(content) > MAX_BYTES:
        raise _unusable(source, f"It has more than {MAX_BYTES >> 20} MiB.")
    if source.suffix not in _TEXTS:
        return
    try:
        text = content.decode("utf-8")
        if source.suffix == ".json":
            if sum(map(text.count, ",[{")) > _MOST_VALUES:
                raise _unusable(source, f"It has more than {_MOST_VALUES:,} values.")
            json.loads(text)
    except UnicodeDecodeError as error:
        raise _unusable(source, "It is not UTF-8 text.") from error
    except (ValueError, RecursionError) as error:
        raise _unusable(source, f"It is not JSON: {str(error)[:200]}.") from error


def _unusable(source: Path, why: str) -> UsageError:
    fix = f"Put a readable copy of {source.name} in its place, or remove it if the model does not need it."
    return UsageError(f"{source} cannot be copied.", why=why, fix=fix)


def copy_accompanying_files(files: Sequence[Path], output: Path, folder: Path) -> list[Path]:
    """Copy files into an output's folder, each whole or not at all, without overwriting any; return the copies.

    Args:
        files: the files.
        output: the file that they belong to.
        folder: the folder to prepare them in, on the same disk.

    Raises:
        UsageError: one cannot be written, or another file of its name has appeared.
    """
    copies = []
    for source in files:
        name, place = f"companion-{source.name}", output.with_name(source.name)
        try:
            with folder_of(folder / name) as work, folder_of(output) as parent:
                _copy(source, folder / name)
                look_again(place, parent)
                _give_free_name(work, name, parent, place.name)
        except FileExistsError as error:
            raise UsageError(f"{place} is not replaced.", why="It appeared during the export.") from error
        except OSError as error:
            raise write_error(place, error) from error
        copies.append(place)
        wrote(place)
    return copies


def _copy(source: Path, copy: Path) -> None:
    """Copy a file; the copy's permissions are not wider than the original's.

    Raises:
        UsageError: the file is no longer usable.
    """
    check_inside(source, source.parent)
    with open_plain(source) as stream:
        original = os.fstat(stream.fileno())
        content = stream.read(MAX_BYTES + 1)
    check_content(source, content)
    with copy.open("xb") as writing:
        writing.write(content)
        writing.flush()
        os.fsync(writing.fileno())
        if hasattr(os, "fchmod"):
            os.fchmod(writing.fileno(), _mode_of(original, os.fstat(writing.fileno())))


def _mode_of(original: os.stat_result, copy: os.stat_result) -> int:
    """Return the mode for a copy: its default mode, without permissions that the original does not give."""
    allowed = stat.S_IMODE(original.st_mode)
    if original.st_gid != copy.st_gid:  # another group: gets the permissions of others
        allowed = allowed & ~stat.S_IRWXG | (allowed & stat.S_IRWXO) << 3
    return stat.S_IMODE(copy.st_mode) & (allowed | stat.S_IRWXU)


def _give_free_name(work: OpenFolder, name: str, parent: OpenFolder, new: str) -> None:
    """Give a file its final name, which must be unused.

    Raises:
        FileExistsError: a file of that name has appeared.
        OSError: the place cannot be written.
    """
    try:
        work.link(name, parent, new)  # unlike a move, never replaces a file
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: an empty file claims the name first
        parent.add(new)
        try:
            work.move(name, parent, new)
        except OSError:
            parent.remove_file(new)
            raise
