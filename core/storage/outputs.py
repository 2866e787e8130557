"""Write every output in the same way: check it, reserve it, and publish it.

`check_outputs` refuses what would lose something, before any work begins. `writing` reserves the names for this
process, checks again, and gives the folder to work in; `core.storage.publishing` moves finished files to their places.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from ..error_texts import argument
from ..errors import UsageError
from .exposed import link_of_another
from .file_kinds import (
    CONFIG_SUFFIXES,
    ENGINE,
    NOTHING,
    NPZ,
    ONNX,
    SIDECAR,
    SIDECAR_OR_MANIFEST,
    Kind,
    contents_of,
    default_configs,
    kind_named,
    name_error,
)
from .files import is_file, last_look, work_folder, write_error
from .publishing import MAX_BYTES, check_leftover, sidecar_path

_LONGEST_NAME = 255  # bytes, where the file system does not say
# Errors that come from the disk, wherever in the work they are raised.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENAMETOOLONG}


class Output(NamedTuple):
    """A path to write, and the kind of file to write."""

    path: Path
    kind: Kind

    def files(self) -> list[Output]:
        """List this output and its sidecar."""
        return [self, Output(sidecar_path(self.path), SIDECAR)] if self.kind.has_sidecar else [self]


class _Judged(NamedTuple):
    """Outputs that were judged and are reserved, with the inputs and whether existing files are replaced."""

    outputs: tuple[Output, ...]
    inputs: frozenset[Path]
    overwrite: bool

    def covers(self, output: Output, inputs: Iterable[Path], overwrite: bool) -> bool:
        """Return whether an output was judged as it would be now."""
        return output in self.outputs and self.inputs.issuperset(inputs) and self.overwrite == overwrite


# What the blocks around this one have judged and reserved: a command, and the function that it calls.
_judged: ContextVar[Sequence[_Judged]] = ContextVar("judged", default=())


@contextmanager
def writing(*outputs: Output, inputs: Iterable[Path] = (), overwrite: bool = False) -> Iterator[Path]:
    """Reserve outputs until the block ends; yield a folder next to the last output to prepare them in.

    The folder is on the same file system as that output, and is removed on every way out; after a kill, by the next
    process that writes there.

    Args:
        outputs: what the block writes, the main one last.
        inputs: files that the block reads; they are never overwritten.
        overwrite: existing files of the same kind may be replaced.

    Raises:
        UsageError: as `reserved`; or a folder is in the way that only looks like one of an interrupted write; or the
            disk refuses what the block writes.
    """
    with reserved(outputs, inputs=inputs, overwrite=overwrite) as folder:
        together = [output for output in outputs if output.kind.has_sidecar or output.kind.with_main]
        names = [file.path.name for output in together for file in output.files()]
        if names:
            check_leftover(outputs[-1].path, names)
        try:
            yield folder
        except OSError as error:
            if error.errno in _DISK or str(error.filename or "").startswith(str(folder)):
                raise write_error(outputs[-1].path, error) from error
            raise


@contextmanager
def reserved(outputs: Sequence[Output], *, inputs: Iterable[Path] = (), overwrite: bool = False) -> Iterator[Path]:
    """Reserve these outputs for this process until the block ends; yield the folder to prepare the last one in.

    Raises:
        UsageError: as `check_outputs`; or another process writes one of them, or their folders cannot be written.
    """
    inputs = list(inputs)
    judged = [*_judged.get(), _Judged(tuple(outputs), frozenset(inputs), overwrite)]
    new = [output for output in outputs if not any(x.covers(output, inputs, overwrite) for x in judged[:-1])]
    check_outputs(new, inputs=inputs, overwrite=overwrite)
    with ExitStack() as stack:
        folders = {}
        for parent in dict.fromkeys(output.path.absolute().parent for output in outputs):
            stack.enter_context(_made(parent))
        for path in sorted({file.path for output in outputs for file in output.files()}):
            folders[path] = stack.enter_context(work_folder(path))
        check_outputs(new, inputs=inputs, overwrite=overwrite)  # another process may have written meanwhile

        def look(target: Path) -> None:
            files = [file for output in outputs for file in output.files() if file.path == target]
            _check_files(files, inputs=inputs, overwrite=overwrite)

        tokens = last_look.set(look), _judged.set(judged)
        try:
            yield folders[outputs[-1].path]
        finally:
            last_look.reset(tokens[0])
            _judged.reset(tokens[1])


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder and those around it while the block runs; those that are still empty afterwards are removed.

    Raises:
        UsageError: it cannot be made.
    """
    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    made = []
    try:
        for place in reversed(missing):
            place.mkdir(exist_ok=True)
            made.append(place)
    except OSError as error:
        for place in reversed(made):
            with suppress(OSError):
                place.rmdir()
        raise write_error(folder, error) from error
    try:
        yield
    finally:
        for place in reversed(made):
            with suppress(OSError):  # what was written is in it
                place.rmdir()


def check_outputs(outputs: Sequence[Output], *, inputs: Iterable[Path] = (), overwrite: bool = False) -> None:
    """Refuse outputs that cannot be written or that would replace something that must be kept.

    Args:
        outputs: what will be written.
        inputs: files that will be read; files in the same folder that belong to them count too.
        overwrite: existing files of the same kind may be replaced.

    Raises:
        UsageError: a name of another kind, or too long; no such folder; a target that is no regular file; an input, or
            a file of another kind, whatever `overwrite` says; an existing file without `overwrite`; one file twice.
    """
    for output in outputs:
        _check_name(*output)
    _check_files([file for output in outputs for file in output.files()], inputs=inputs, overwrite=overwrite)


def _check_files(files: Sequence[Output], *, inputs: Iterable[Path], overwrite: bool) -> None:
    """Check the files to write one by one, as `check_outputs` does with those of its outputs."""
    read = {same: path for given in inputs for path in (given, *files_read_with(given)) if (same := _identity(path))}
    seen: set[Path] = set()
    for path, kind in files:
        _check_name(path, kind)
        place = path.absolute().parent.resolve() / path.name
        if place in seen:
            raise UsageError(f"{path} is named twice.", why="Two outputs have this path.", fix="Rename one of them.")
        seen.add(place)
        _check_place(path, kind, read)
        if is_file(path) and not overwrite and not kind.extended:
            raise UsageError(
                f"{path} already exists.",
                why="Existing files are kept.",
                fix=f"Use {argument('overwrite', True)} to overwrite it.",
            )
    for path, kind in files:
        if is_file(path):
            _check_contents(path, kind)


def _check_name(path: Path, kind: Kind) -> None:
    """Check that the name fits the kind and is valid on the file system."""
    if path.name in ("", "..") or (kind is not SIDECAR and kind_named(path, (kind,)) is None):
        raise name_error(path, (kind,))
    parent = next((x for x in path.absolute().parents if os.path.lexists(x)), Path("/"))
    if not os.path.isdir(parent):  # noqa: PTH112 (`Path.is_dir` raises where a name is too long)
        raise UsageError(f"Cannot write {path}.", why=f"{parent} is not a folder.", fix="Choose another path.")
    try:
        longest = os.pathconf(parent, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):  # not on Windows
        longest = _LONGEST_NAME
    if len(os.fsencode(path.name)) > longest:
        raise UsageError(
            f"The name {path.name[:40]}… is too long.",
            why=f"It has {len(os.fsencode(path.name))} bytes; the file system allows {longest}.",
            fix="Choose a shorter name.",
        )


def _check_place(path: Path, kind: Kind, read: dict[tuple[int, int], Path]) -> None:
    """Check that the existing entry at a path may be replaced.

    That is nothing, a regular file that the command does not read, or, for a kind that is a folder, a folder; one that
    is replaced as a whole must hold nothing that the command reads.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(path, error) from error
    if stat.S_ISLNK(mode):
        fix = "Give the path of that file, or choose another name."
        raise _not_replaced(path, f"It is a symbolic link to {path.readlink()}.", fix)
    link = link_of_another(path)
    if link is not None:
        why = f"{link}, a part of the path, is a symbolic link of another user."
        raise _not_replaced(path, why, "Give the folder that it leads to, or choose another path.")
    if kind.folder and stat.S_ISDIR(mode):
        for inside in read.values() if kind.contents else ():
            if path.resolve() in inside.resolve().parents:
                raise _not_replaced(path, f"It contains {inside}, which the command reads.", "Choose another name.")
        return
    if not stat.S_ISREG(mode) or (kind.folder and not kind.contents):
        what = "a folder" if stat.S_ISDIR(mode) else "a file" if stat.S_ISREG(mode) else "a device, a pipe or a socket"
        raise UsageError(f"Cannot write {path}.", why=f"It is {what}.", fix="Choose another name.")
    given = read.get(_identity(path) or (0, 0))
    if given is not None:
        same = "" if path == given else f" It is the same file as {given}."
        raise _not_replaced(path, f"The command reads it.{same}", "Choose another name for the output.")


def _not_replaced(path: Path, why: str, fix: str) -> UsageError:
    """Return the error for an existing entry that must be kept."""
    return UsageError(f"{path} is not replaced.", why=why, fix=fix)


def _check_contents(path: Path, kind: Kind) -> None:
    """Check that an existing file is of the same kind as its replacement."""
    try:
        found = contents_of(path)
    except OSError as error:
        raise write_error(path, error) from error
    empty = found == NOTHING and not kind.extended
    if empty or found in kind.contents or (kind is ENGINE and _has_sidecar(path)):
        return
    why = f"It is {found}, and the output is {kind.name}."
    raise _not_replaced(path, why, "Choose another name, or remove it yourself.")


def _has_sidecar(path: Path) -> bool:
    sidecar = sidecar_path(path)
    return is_file(sidecar) and contents_of(sidecar) == SIDECAR_OR_MANIFEST


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file that a path leads to; equal for all links to one file."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def files_read_with(path: Path) -> Iterator[Path]:
    """List files in an input's folder that may be read with it: configuration, sidecar, weights, prefill file."""
    if not is_file(path):
        return
    yield sidecar_path(path)
    if path.suffix.lower() not in (*ONNX.suffixes, *ENGINE.suffixes, *NPZ.suffixes, *CONFIG_SUFFIXES):
        yield from default_configs(path)
    if not is_file(sidecar_path(path)):
        return
    try:
        with sidecar_path(path).open("rb") as stream:
            entries = json.loads(stream.read(MAX_BYTES))
        step = entries.get("step") or {}
        for name in (entries.get("external_data"), step.get("prefill")):
            if isinstance(name, str) and Path(name).name == name:
                yield path.with_name(name)
    except (OSError, ValueError, RecursionError, AttributeError):
        return
