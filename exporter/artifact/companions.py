"""Copy what belongs to a model in a folder, its tokenizer for example, to the side of the exported file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ...core.at_work import wrote
from ...core.errors import UsageError
from ...core.storage.files import is_file, sha256, write_error
from ...core.storage.reading import check_plain


def check_companions(folder: Path, names: Sequence[str], output: Path) -> list[Path]:
    """Return the files of a folder that will be copied beside an output: those that do not lie there yet.

    Args:
        folder: the model's folder.
        names: files that belong to a model, where it has them.
        output: the file to write.

    Raises:
        UsageError: another file of one of these names lies there, which is never replaced.
    """
    found = []
    for source in (folder / name for name in names):
        if not source.exists():
            continue
        check_plain(source)
        place = output.with_name(source.name)
        if not os.path.lexists(place):
            found.append(source)
        elif not is_file(place) or sha256(place) != sha256(source):
            raise UsageError(
                f"{place} is not replaced.",
                why=f"It is another file than the {source.name} of {folder}, which belongs beside {output.name}.",
                fix="Write into a folder of its own.",
            )
    return found


def copy_companions(files: Sequence[Path], output: Path, folder: Path) -> list[Path]:
    """Copy files beside an output, each whole or not at all, and none over another; return the copies.

    Args:
        files: the files.
        output: the file that they belong to.
        folder: the folder to prepare them in, on the same disk.

    Raises:
        UsageError: one cannot be written, or another file of its name has appeared.
    """
    copies = []
    for source in files:
        staged, place = folder / f"companion-{source.name}", output.with_name(source.name)
        try:
            shutil.copyfile(source, staged)
            _move_to_free_place(staged, place)
        except FileExistsError as error:
            raise UsageError(f"{place} is not replaced.", why="It appeared during the export.") from error
        except OSError as error:
            raise write_error(place, error) from error
        copies.append(place)
        wrote(place)
    return copies


def _move_to_free_place(staged: Path, place: Path) -> None:
    """Give a file its final name, which must not be taken.

    Raises:
        FileExistsError: a file of that name has appeared.
        OSError: the place cannot be written.
    """
    try:
        os.link(staged, place)  # unlike a move, never over a file that has appeared
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: an empty file claims the name first
        place.open("xb").close()
        try:
            staged.replace(place)
        except OSError:
            place.unlink()
            raise
