"""Read a folder of torch.distributed.checkpoint with torch's own reader, without running code from it.

Its `.metadata` is a pickle, which torch's reader opens without any limit. Here it is opened by an unpickler that knows
the classes of that format and nothing else. Of the other files only tensors are read, with `weights_only=True`.
"""

from __future__ import annotations

import importlib
import io
import logging
import math
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...core.error_texts import first_line
from ...core.errors import UsageError
from ...core.storage.reading import read_plain
from ...core.storage.unchanged import Unchanged

METADATA = ".metadata"
_LARGEST_METADATA = 256 << 20
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "torch": ("Size", "device"),
}
# A name in the state of an optimizer that was saved flat, together with the names of the model.
_FLAT = re.compile(r"optim\w*\.(state|param_groups)\.")
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
_GATHER = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pt"


def read_distcp(folder: Path, known: Unchanged) -> tuple[dict[str, Any], list[Path], list[str]]:
    """Read the tensors of a folder, except those of an optimizer.

    Args:
        folder: the folder.
        known: gets every file before it is read.

    Returns:
        The nested tables that were saved; the files that were read; notes.

    Raises:
        UsageError: the metadata is missing, broken, or refers to anything but this format; a file is missing or cut.
    """
    if (folder / METADATA).is_file():
        known.add([folder / METADATA])
    metadata = _metadata(folder)
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    tensors: dict[str, torch.Tensor] = {}
    skipped = 0
    files = _checked_files(folder, metadata)
    known.add(files)
    budget = sum(file.stat().st_size for file in files)
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            continue
        if any(part.lower().startswith("optim") for part in _path(metadata, name)[:-1]) or _FLAT.match(name):
            skipped += 1
            continue
        budget -= math.prod(stored.size) * stored.properties.dtype.itemsize
        if budget < 0 or any(size < 0 for size in stored.size):
            raise _broken(folder, f"{name} claims the shape {list(stored.size)}: more data than its files contain.")
        if not _covered(stored):
            raise _broken(folder, f"Its parts do not add up to {name}, whose shape is {list(stored.size)}.")
        tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    if skipped and not tensors:
        raise UsageError(
            f"{folder} contains the state of an optimizer, not the weights of a model.",
            why=f"All of its {skipped} tensors belong to an optimizer.",
            fix="Give the folder of the model's weights.",
        )
    if not tensors:
        raise UsageError(
            f"{folder} contains no tensors.", why="Its metadata lists no tensor.", fix="Copy the whole folder again."
        )
    _fill(folder, metadata, tensors)
    notes = [f"read from {len(files)} file(s) of torch.distributed.checkpoint"]
    if skipped:
        notes.append(f"{skipped} tensors of the optimizer are not read")
    return _nested(folder, metadata, tensors), [folder / METADATA, *files], notes


def _covered(stored: Any) -> bool:
    """Return whether the parts of a tensor cover it completely: torch's reader leaves other memory unchanged."""
    size = tuple(stored.size)
    parts = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
    inside = all(
        len(starts) == len(lengths) == len(size)
        and all(start >= 0 and 0 <= n <= whole - start for start, n, whole in zip(starts, lengths, size, strict=True))
        for starts, lengths in parts
    )
    if not inside or math.prod(size) == 0 or any(lengths == size for _, lengths in parts):
        return inside
    seen = torch.zeros(size, dtype=torch.bool)
    for starts, lengths in parts:
        seen[tuple(slice(start, start + n) for start, n in zip(starts, lengths, strict=True))] = True
    return bool(seen.all())


def _fill(folder: Path, metadata: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Fill tensors from the folder, by torch's reader."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return metadata

    try:
        with _quiet():
            load(tensors, storage_reader=Reader(folder), no_dist=True)
    except Exception as error:  # the files control what is read
        text = first_line(error.__cause__ or error, 200)
        raise _broken(folder, text) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings about missing distributed processes."""
    import warnings

    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


class _Unpickler(pickle.Unpickler):
    """Build the classes of this format, and refuse all others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib" or module.startswith("pathlib."):
            if name in _PATHS:
                return _joined
        elif name in _CLASSES.get(module, ()):
            return getattr(importlib.import_module(module), name)
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"It refers to {module}.{name}.")


def _joined(*parts: object) -> str:
    """Stand in for an unused path in the metadata."""
    return "/".join(map(str, parts))


def _metadata(folder: Path) -> Any:
    try:
        text = read_plain(folder / METADATA, _LARGEST_METADATA)
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} has no {METADATA}.",
            why="This file of torch.distributed.checkpoint says which file holds which part of each tensor.",
            fix=f"Copy it too: its name begins with a dot, so that `cp {folder}/*` leaves it out.",
        ) from error
    except OSError as error:
        raise UsageError(f"Cannot read {folder / METADATA}.", why=f"{error.strerror or error}.") from error
    try:
        metadata = _Unpickler(io.BytesIO(text)).load()
        from torch.distributed.checkpoint.metadata import Metadata

        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise pickle.UnpicklingError("It is not the metadata of a checkpoint.")
        if not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError("It does not say where its tensors are.")
        if getattr(metadata, "storage_meta", None) is None:
            from torch.distributed.checkpoint.metadata import StorageMeta

            metadata.storage_meta = StorageMeta()
        for stored in metadata.state_dict_metadata.values():
            hash(stored.properties.dtype) if hasattr(stored, "properties") else None
    except Exception as error:  # the file controls what the unpickler does
        if isinstance(error, pickle.UnpicklingError) and str(error).startswith("It refers to"):
            raise UsageError(
                f"{folder / METADATA} contains objects that torch.distributed.checkpoint does not write.",
                why=f"{error} Building it could run code from the file, so it is not opened.",
                fix=f"If you trust it, run where it was trained: {_GATHER.format(folder=folder)}",
            ) from error
        raise _broken(folder, first_line(error, 200)) from error
    return metadata


def is_name(name: str) -> bool:
    """Return whether a text can be the name of a file in a folder and not outside it."""
    return 0 < len(name.encode("utf-8", "replace")) < 256 and name not in (".", "..") and not set(name) & set("/\\\0")


def _checked_files(folder: Path, metadata: Any) -> list[Path]:
    """Return the files that hold the tensors.

    Raises:
        UsageError: a file is missing, is in another folder, or is shorter than its parts.
    """
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        name = str(getattr(info, "relative_path", ""))
        offset, length = getattr(info, "offset", -1), getattr(info, "length", -1)
        if not is_name(name):
            raise _broken(folder, f"A part is in {name[:80]!r}, outside the folder.")
        if not isinstance(offset, int) or not isinstance(length, int) or offset < 0 or length < 0:
            raise _broken(folder, f"A part of {name} has no file.")
        if getattr(info, "transform_descriptors", None):
            raise _broken(folder, "Its parts are compressed by an extension.")
        ends[name] = max(ends.get(name, 0), offset + length)
    missing = [name for name in ends if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            f"{folder} lacks {len(missing)} of its {len(ends)} files: {', '.join(sorted(missing)[:3])}.",
            why="Each device that trained the model wrote some of the files.",
            fix="Copy the whole folder.",
        )
    cut = [name for name, end in ends.items() if (folder / name).stat().st_size < end]
    if cut:
        raise _broken(folder, f"{sorted(cut)[0]} is incomplete: it is shorter than the parts that it should contain.")
    return [folder / name for name in sorted(ends)]


def _path(metadata: Any, name: str) -> tuple[str, ...]:
    """Return the tables around a tensor, and its name in the innermost table."""
    planner = metadata.planner_data
    path = planner.get(name) if isinstance(planner, Mapping) else None
    if isinstance(path, tuple) and path and all(isinstance(part, str | int) for part in path):
        return tuple(map(str, path))
    return (name,)


def _nested(folder: Path, metadata: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Put tensors into the nested tables that were saved.

    Raises:
        UsageError: two of them have one place.
    """
    nested: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *tables, last = _path(metadata, name)
        inner = nested
        for part in tables:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise _broken(folder, f"{name} overlaps another tensor.")
        if last in inner:
            raise _broken(folder, f"{name} is in the place of another tensor.")
        inner[last] = tensor
    return nested


def _broken(folder: Path, why: str) -> UsageError:
    return UsageError(
        f"{folder} cannot be read as a checkpoint of torch.distributed.checkpoint.",
        why=why,
        fix=f"Copy the whole folder again; or run where it was trained: {_GATHER.format(folder=folder)}",
    )
