"""Publish files that belong together (model, weights, sidecar) at one moment, even if the process is killed.

One rename is atomic, several are not. So finished files are gathered in a folder, and one rename of that folder next to
their places is the moment of change; then they move to their places, in an order that never leaves a model without its
weights. What a killed process had not moved yet is moved by the next process that writes the same file, and by nothing
else: reading changes nothing. A file's sidecar has the SHA-256 of the file, and a seal, the SHA-256 of its own entries:
`check_unchanged` notices that either was altered, or that a write was interrupted between the two.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..at_work import wrote
from ..error_texts import argument
from ..errors import CheckFailed, UsageError
from .files import MARK, displaced, folder_of, is_marked, look_again, sha256, sha256_of, write_error
from .open_folder import OpenFolder
from .reading import read_plain

_log = logging.getLogger(__name__)

# A folder with finished files before they are moved to their places; its name ends in the main file's name.
_PREFIX = ".localattn.next."
_LONGEST_NAME = 255  # bytes
# The entry of a sidecar that holds the SHA-256 of all others.
SEAL = "facts_sha256"
# The entries that hold the SHA-256 of the described file, each with the advice if it differs.
_DIGESTS = {
    "model_sha256": "Copy both files again, or create both again; to use the file without its sidecar, remove {}.",
    "engine_sha256": "Copy engine and {} together, or build the engine again: localattn build.",
}
# External data written here carries the first hex digits of its SHA-256 in its name.
_DATA_NAME = re.compile(r".*\.([0-9a-f]{12})\.data", re.DOTALL)
# A sidecar has a few kilobytes; a larger file is something else.
MAX_BYTES = 16 << 20


def sidecar_path(model: Path) -> Path:
    """Return the path of a file's sidecar: `model.onnx` → `model.onnx.json`."""
    return model.parent / (model.name + ".json")  # of ".", which has no name, too


def publish_together(staged: Mapping[Path, Path], folder: Path) -> None:
    """Move finished files to their places, all of which change at one moment.

    Args:
        staged: each finished file and its place; all places are in one folder, and the last is the main file's.
        folder: where they were prepared (`core.storage.outputs.writing`), on the same disk.

    Raises:
        UsageError: one of the places is no regular file, cannot be written, or holds something that has appeared since
            the work began and must stay.
    """
    main = list(staged.values())[-1]
    for place in staged.values():
        if os.path.lexists(place) and not stat.S_ISREG(place.lstat().st_mode):
            why = "It is a folder, a link or a device."
            raise UsageError(f"Cannot write {place}.", why=why, fix="Remove it, or choose another name.")
    names = [place.name for place in staged.values()]
    batch = _batch_of(main)
    try:
        with ExitStack() as stack:
            work, parent = (stack.enter_context(folder_of(path)) for path in (folder / "gathered", main))
            work.make("gathered")
            gathered = work.open("gathered")
            stack.callback(gathered.close)
            gathered.add(MARK)
            for file, place in staged.items():
                with folder_of(file) as source:
                    source.flush(file.name)
                    source.move(file.name, gathered, place.name)
            gathered.flush()
            for place in staged.values():
                look_again(place, parent)
            _finish_interrupted(main, names, parent)
            work.move("gathered", parent, batch.name)  # at this moment all files change
            gathered.path = batch
            wrote(*staged.values())
            try:
                lost = _move(gathered, names, parent)
            except (KeyboardInterrupt, SystemExit):  # a signal to end that came after this moment
                _move(gathered, names, parent)
                raise
        if lost:
            raise displaced(main.with_name(lost[0]))
        _log.info("wrote %s", ", ".join(str(place) for place in staged.values()))
    except OSError as error:
        raise write_error(main, error) from error


def _move(batch: OpenFolder, names: Collection[str], parent: OpenFolder) -> list[str]:
    """Move the files in the open folder of finished files to their places, and remove it.

    Returns:
        Those that somebody replaced at once.
    """
    lost = []
    for name in _in_order(names):
        with contextlib.suppress(FileNotFoundError):
            if not batch.move(name, parent, name):
                lost.append(name)
    with contextlib.suppress(FileNotFoundError):
        batch.remove_file(MARK)
    with contextlib.suppress(OSError):  # another folder that has taken the name stays, unless it is empty
        parent.remove_folder(batch.path.name)
    return lost


def _batch_of(main: Path) -> Path:
    """Return the folder of finished files of a main file; its name has a digest if the file's is too long."""
    name = _PREFIX + main.name
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = _PREFIX + hashlib.sha256(os.fsencode(main.name)).hexdigest()
    return main.with_name(name)


def _in_order(names: Collection[str]) -> list[str]:
    # Data first and sidecar last: other readers never see a model without its weights.
    rank = {".data": 0, ".onnx": 1, ".json": 3}
    return sorted(set(names), key=lambda name: (rank.get(Path(name).suffix, 2), name))


def check_leftover(main: Path, names: Collection[str]) -> None:
    """Refuse to write if a folder is in the way that only looks like the rest of an interrupted write.

    Args:
        main: the file to write.
        names: of the files that the write produces, besides external data.

    Raises:
        UsageError: it is a link, belongs to another user, or holds something that the write would not produce.
    """
    with _leftover(main, names):
        pass


def _finish_interrupted(main: Path, names: Collection[str], parent: OpenFolder) -> None:
    """Move the files that a killed process had published as `main` but not moved; `names` as for `check_leftover`."""
    with _leftover(main, names) as batch:
        if batch is not None:
            _move(batch, [name for name in batch.names() if name != MARK], parent)


@contextmanager
def _leftover(main: Path, names: Collection[str]) -> Iterator[OpenFolder | None]:
    """Open the folder of an interrupted write, if there is one."""
    batch = _batch_of(main)
    with folder_of(main) as parent:
        if not parent.holds(batch.name):
            yield None
            return
        try:
            folder = parent.open(batch.name)
        except OSError as error:
            raise _foreign(batch, "This system does not show whether an interrupted write left it.") from error
        try:
            if folder.descriptor is None:  # Windows, where folders cannot be opened
                raise _foreign(batch, "This system does not show whether an interrupted write left it.")
            if folder.stat().st_uid != os.geteuid():
                raise _foreign(batch, "It belongs to another user.")
            found = folder.names()
            for name in found:
                if name != MARK and not _is_own(name, folder.descriptor, main, names):
                    raise _foreign(batch, f"It contains {name!r}, which a write of {main.name} does not produce.")
            # Anyone who can write to the parent folder can give this name to any folder of the user.
            if found and not is_marked(folder):
                raise _foreign(batch, f"It lacks the file {MARK}, which an interrupted write leaves.")
            yield folder
        finally:
            folder.close()


def _is_own(name: str, folder: int, main: Path, names: Collection[str]) -> bool:
    """Check that an entry of an open folder is a regular file of the user that a write of `main` produces."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return False
    if name in names:
        return True
    stated = _DATA_NAME.fullmatch(name)
    if stated is None or not name.startswith(f"{main.name}."):
        return False
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb") as stream:
        return sha256_of(stream).startswith(stated[1])


def _foreign(batch: Path, why: str) -> UsageError:
    fix = "Look at its contents, and remove it."
    return UsageError(f"{batch} is in the way.", why=why, fix=fix)


def sealed(text: str) -> str:
    """Add the SHA-256 of all entries to a sidecar in JSON.

    Raises:
        ValueError: the text is not one JSON object.
    """
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("a sidecar is a JSON object")
    document[SEAL] = _seal(document)
    return json.dumps(document, indent=2) + "\n"


def _seal(document: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in document.items() if name != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def check_seal(path: Path, text: bytes) -> None:
    """Check that a sidecar agrees with its seal, if it has one.

    Raises:
        CheckFailed: they do not agree.
    """
    try:
        document = json.loads(text)
        stated = document.get(SEAL) if isinstance(document, dict) else None
        intact = stated is None or stated == _seal(document)
    except (ValueError, RecursionError):  # JSON that localattn did not write
        intact = False
    if not intact:
        raise CheckFailed(
            f"{path} was changed after it was written.",
            why=f"Its entries do not match its {SEAL}.",
            fix="Copy it again together with its model, or create both again.",
        )


def check_unchanged(model: Path, digest: Callable[[], str] | None = None) -> None:
    """Check that a file and its external data are those for which its sidecar was written.

    The file is an ONNX file or an engine. Record that are missing, broken, or without digests are not checked here.

    Args:
        model: the file.
        digest: returns its SHA-256, where the file was read already.

    Raises:
        CheckFailed: the SHA-256 of the file or of its data differs.
    """
    try:
        document = json.loads(read_plain(sidecar_path(model), MAX_BYTES))
        for entry, fix in _DIGESTS.items():
            stated = document.get(entry)
            if isinstance(stated, str) and stated and stated != (digest or (lambda: sha256(model)))():
                raise _changed(model, model.name, fix)
        data = document.get("external_data")
        named = _DATA_NAME.fullmatch(data) if isinstance(data, str) and Path(data).name == data else None
        if named is not None and not sha256(model.with_name(named[0])).startswith(named[1]):
            raise _changed(model, named[0], _DIGESTS["model_sha256"])
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return


def _changed(model: Path, name: str, fix: str) -> CheckFailed:
    batch = _interrupted(model)
    if batch is not None:
        return CheckFailed(
            f"The write that replaced {name} was interrupted.",
            why=f"{sidecar_path(model).name} is still the old one; the other new files are in {batch.name}.",
            fix=f"Run the command that wrote it again with {argument('overwrite', True)}, which completes the write.",
        )
    return CheckFailed(
        f"{name} is not the file that {sidecar_path(model).name} was written for.",
        why="Its SHA-256 differs: one of the two files was changed or replaced without the other.",
        fix=fix.format(sidecar_path(model)),
    )


def _interrupted(model: Path) -> Path | None:
    """Find the folder with a newer sidecar of a model that an interrupted write left; change nothing."""
    with contextlib.suppress(OSError):
        for batch in model.parent.glob(f"{_PREFIX}*"):
            if not batch.is_symlink() and os.path.lexists(batch / sidecar_path(model).name):
                return batch
    return None
