"""Read an ONNX file once, judge it, and give engines exactly the judged bytes.

onnx's parser reads the file into a canonical form (`canonical.py`), which is judged (`judgement.py`) and serialised
again: these bytes go to every engine. Weights of a large file are not in them. They stay where they are, as external
data at an offset of the file itself, which engines map.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.errors import CheckFailed, UsageError
from ..core.storage.publishing import check_unchanged
from ..core.storage.reading import check_plain, open_plain
from ..core.storage.wrong_file import START as FIRST_BYTES
from ..core.storage.wrong_file import refuse_wrong_file
from . import judgement
from .canonical import canonical
from .graph_values import all_nodes
from .judgement import Growth, Refused, lies_inside
from .wire_model import TooMany, without_weights

# Larger files are not loaded: they are hashed in blocks, and engines read their weights from the disk.
IN_MEMORY = 16 << 20
# Tensors of this size in bytes or more stay in such a file. Smaller ones may be shapes, which engines need.
LARGE_TENSOR = 1 << 14
_BLOCK = 1 << 20
# Advice for a link that is not followed.
_COPY = "Replace the link by a copy of the file."
# The size limit of a protobuf message in bytes.
_LARGEST = 1 << 31
# The limit, less room for functions.
_MOST_BYTES = (1 << 31) - (1 << 20)
TOO_LARGE = "Its weights are larger than 2 GB, the limit of an ONNX model in memory."
_log = logging.getLogger(__name__)

# Device, inode, size, and the times of the last changes of content and of anything else, in nanoseconds.
_State = tuple[int, int, int, int, int]


class NotAModel(UsageError):
    """The file was read, but is not an ONNX model."""


class OnnxFile:
    """Hold an ONNX model and its path; made by `read` or `of_bytes`.

    A model of up to `IN_MEMORY` bytes is in memory. The weights of larger models and external data stay on the disk:
    `check_same` refuses them if they were changed since they were checked.

    Attributes:
        path: the file; None for a model in memory.
        name: its name in errors.
        size: bytes of the file, without external data.
    """

    def __init__(self, path: Path | None, data: bytes | None, size: int, descriptor: int = -1) -> None:
        self.path, self.size, self._data, self._descriptor = path, size, data, descriptor
        self.name = "The model in memory" if path is None else str(path)
        self._read = _state(descriptor) if descriptor >= 0 else None

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    @classmethod
    def read(cls, path: str | Path | OnnxFile) -> OnnxFile:
        """Read a file; an `OnnxFile` is returned as it is.

        Raises:
            UsageError: there is no such file, or it cannot be read: it is not a regular file, or larger than any model.
        """
        if isinstance(path, OnnxFile):
            return path
        path = Path(path)
        try:
            with open_plain(path) as stream:
                size = os.fstat(stream.fileno()).st_size
                _log.debug("reading %s, %d bytes", path, size)
                if size > _LARGEST:
                    raise _no_model(str(path), "It is larger than 2 GiB, the limit of an ONNX file.")
                if size > IN_MEMORY:
                    return cls(path, None, size, os.dup(stream.fileno()))
                content = stream.read(IN_MEMORY + 1)
                refuse_wrong_file(path, content[:FIRST_BYTES])
        except (OSError, ValueError) as error:  # ValueError: an invalid file name
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise UsageError(f"Cannot read {path}.", why=why) from error
        if len(content) > IN_MEMORY:
            raise UsageError(
                f"Cannot read {path}.", why="It grew while it was read.", fix="Try again when it is complete."
            )
        return cls(path, content, len(content))

    @classmethod
    def of_bytes(cls, content: bytes) -> OnnxFile:
        """Make an `OnnxFile` of a serialized model in memory."""
        return cls(None, content, len(content))

    def rewritten(self, model: Any) -> OnnxFile:
        """Return a rewrite of this file, made from `parse()`, which refers to the same external data."""
        content = model.SerializeToString()
        found = OnnxFile(self.path, content, len(content))
        found._states = self._states
        return found

    def __fspath__(self) -> str:
        return self.name

    @property
    def original(self) -> bytes | None:
        """The bytes that were read; None for a file that is too large for memory."""
        return self._data

    @property
    def content(self) -> bytes:
        """The bytes that an engine opens: the canonical form, whose external data is in `folder`."""
        return bytes(self.for_engines().SerializeToString())

    @cached_property
    def folder(self) -> Path | None:
        """The folder in which an engine finds external data, with links in its path resolved."""
        return self._places[0]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the file, without external data, as lower-case hex."""
        digest = hashlib.sha256()
        for block in self._blocks(_BLOCK):
            digest.update(block)
        return digest.hexdigest()

    def _blocks(self, size: int) -> Iterator[bytes]:
        """Yield the content from its beginning: a file on the disk in blocks of `size` bytes, any other at once."""
        if self._data is not None:
            yield self._data
            return
        with open(self._descriptor, "rb", closefd=False) as stream:
            stream.seek(0)
            while block := stream.read(size):
                yield block

    @cached_property
    def model(self) -> Any:
        """The canonical `onnx.ModelProto`, which nobody may change; large weights of a large file are not in it.

        Raises:
            NotAModel: it is another kind of file, or incomplete.
        """
        try:
            return canonical(self._without_weights())
        except ValueError as error:
            raise _no_model(self.name, str(error)) from error

    def _without_weights(self) -> bytes:
        if self._data is not None:
            return self._data
        assert self.path is not None
        # Not kept: pages of a mapping that were touched count as memory of the process, two megabytes for each touch.
        with mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) as mapped:
            try:
                self.path.name.encode()
            except UnicodeEncodeError:  # a model cannot contain this name
                return mapped[:]
            if not lies_inside(self.path.name):
                return mapped[:]
            try:
                return without_weights(mapped, self.path.name, LARGE_TENSOR)
            except TooMany:
                raise
            except ValueError as error:
                raise ValueError("It is incomplete, or is another kind of file.") from error

    @cached_property
    def operators(self) -> frozenset[tuple[str, str]]:
        """Domain and type of the nodes in the graph and in functions."""
        bodies = (self.model.graph, *self.model.functions)
        return frozenset((node.domain, node.op_type) for body in bodies for node in all_nodes(body))

    @cached_property
    def locations(self) -> frozenset[str]:
        """The locations of external data, as stated in the file."""
        own = frozenset() if self._descriptor < 0 or self.path is None else frozenset((self.path.name,))
        return judgement.locations_of(self.model) - own

    @cached_property
    def _states(self) -> dict[Path, _State | None]:
        """The state of the files on the disk: of the model when it was read, of its data at the first use of this."""
        if self.path is None:
            return {}
        outside = {self.path.parent / location for location in self.locations if lies_inside(location)}
        return {path: _state(path) for path in outside} | ({} if self._read is None else {self.path: self._read})

    @cached_property
    def _places(self) -> tuple[Path | None, dict[str, str]]:
        """The folder of external data, and for each location of the file the path from there, links followed.

        In the cache of Hugging Face's hub a model and its data are links into one folder, under other names.

        Raises:
            UsageError: a location leads out of the model's folder.
        """
        if self.path is None:
            return None, {}
        try:
            given, target = self.path.absolute().parent.resolve(), self.path.resolve().parent
            locations = {*self.locations, *([] if self._descriptor < 0 else [self.path.name])}
            real = {name: (given / name).resolve() for name in locations}
        except (OSError, RuntimeError) as error:  # links in a circle
            raise UsageError(
                f"{self.name} cannot be loaded.", why=f"Its data cannot be found: {error}.", fix=_COPY
            ) from error
        for name, path in real.items():
            if not (path.is_relative_to(given) or path.is_relative_to(target)):
                raise UsageError(
                    f"{self.name} cannot be loaded.",
                    why=f"Its data {name[:100]!r} is a link to {path}, outside its folder.",
                    fix=_COPY,
                )
        folder = given
        if not all(path.is_relative_to(given) for path in real.values()):
            folder = Path(os.path.commonpath([*(path.parent for path in real.values()), target]))
        return folder, {name: path.relative_to(folder).as_posix() for name, path in real.items()}

    def parse_without_weights(self) -> Any:
        """Return a new `onnx.ModelProto` like `parse`, but leave large weights of a large file in the file.

        Small external data is brought into it: the shape inference of onnx and onnxruntime reads no other file.

        Raises:
            UsageError: no ONNX model, or its small external data cannot be read.
        """
        model = _copy(self.model)
        for tensor in judgement.tensors_of(model):
            if tensor.data_location == tensor.EXTERNAL and self.path is not None:
                location = next(entry.value for entry in tensor.external_data if entry.key == "location")
                small = (judgement.claimed_bytes(tensor) or 0) < LARGE_TENSOR
                if small and (self.path.parent / location).is_file():
                    self._bring(tensor)
        return model

    def with_small_data(self) -> bytes | None:
        """Return this file with the external data in it that onnxruntime reads nowhere else.

        Returns:
            None where there is none, and for a file of more than `IN_MEMORY` bytes.

        Raises:
            UsageError: no ONNX model, or its small external data cannot be read.
        """
        if self.original is None:
            return None
        model = self.parse_without_weights()
        left = sum(tensor.data_location == tensor.EXTERNAL for tensor in judgement.tensors_of(model))
        before = sum(tensor.data_location == tensor.EXTERNAL for tensor in judgement.tensors_of(self.model))
        return bytes(model.SerializeToString()) if left < before else None

    def for_engines(self) -> Any:
        """Return a new `onnx.ModelProto` for engines: like `parse_without_weights`, with links resolved.

        Raises:
            UsageError: no ONNX model, or its external data leads out of its folder or is missing.
        """
        folder, places = self._places
        missing = [] if folder is None else [name for name in places if not (folder / places[name]).exists()]
        if missing:
            raise UsageError(
                f"{self.name} is not complete.",
                why=f"Its external data {', '.join(missing)[:200]} is missing.",
                fix="Copy the data file into the model's folder, under its original name.",
            )
        model = self.parse_without_weights()
        for tensor in judgement.tensors_of(model) if folder is not None else ():
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = places[entry.value]
        return model

    def map_data(self, location: str) -> Any:
        """Map a file of external data, or this file, as an array of bytes.

        Raises:
            UsageError: it cannot be read.
        """
        import numpy as np

        assert self.path is not None
        try:
            if location == self.path.name and self._descriptor >= 0:
                with open(self._descriptor, "rb", closefd=False) as stream:
                    return np.memmap(stream, np.uint8, "r")
            with open_plain(self.path.parent / location) as stream:
                return np.memmap(stream, np.uint8, "r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> UsageError:
        return UsageError(
            f"{self.name} cannot be loaded.",
            why=f"Its external data cannot be read: {getattr(error, 'strerror', None) or error}.",
            fix="Copy the data file together with the model.",
        )

    def read_weights(self, model: Any) -> Any:
        """Load all external data into a model from `parse`, in place, and return it.

        Raises:
            UsageError: the data cannot be read.
            ValueError: the model would be too large, with the text `TOO_LARGE`.
        """
        outside = [tensor for tensor in judgement.tensors_of(model) if tensor.data_location == tensor.EXTERNAL]
        if sum(judgement.claimed_bytes(tensor) or 0 for tensor in outside) + model.ByteSize() > _MOST_BYTES:
            raise ValueError(TOO_LARGE)
        if self.path is not None:
            for tensor in outside:
                self._bring(tensor)
        return model

    def data_of(self, tensor: Any) -> bytes:
        """Return the bytes of a tensor of this file whose data lies in it or in another file.

        Raises:
            OSError: it cannot be read.
        """
        assert self.path is not None
        said = {entry.key: entry.value for entry in tensor.external_data}
        offset, length = int(said.get("offset") or 0), judgement.claimed_bytes(tensor) or 0
        if said["location"] == self.path.name and self._descriptor >= 0:
            with open(self._descriptor, "rb", closefd=False) as stream:
                stream.seek(offset)
                data = stream.read(length)
        else:
            with open_plain(self.path.parent / said["location"]) as stream:
                stream.seek(offset)
                data = stream.read(length)
        if len(data) < length:
            raise OSError(f"{said['location']} is incomplete")
        return data

    def _bring(self, tensor: Any) -> None:
        """Put the data of a tensor that lies in a file into the tensor."""
        try:
            data = self.data_of(tensor)
        except OSError as error:
            raise self._unreadable(error) from error
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = data

    def parse(self) -> Any:
        """Parse the file into a new `onnx.ModelProto`, without its external data.

        Raises:
            NotAModel: it is another kind of file, or incomplete.
        """
        model = _copy(self.model)
        if self._descriptor >= 0 and self.path is not None:
            for tensor in judgement.tensors_of(model):
                if any(entry.key == "location" and entry.value == self.path.name for entry in tensor.external_data):
                    self._bring(tensor)
        return model

    def check_unchanged(self) -> None:
        """Refuse a file that its sidecar was not written for.

        Raises:
            CheckFailed: the SHA-256 of the file or of its external data differs.
        """
        if self.path is not None:
            _ = self._states
            check_unchanged(self.path, lambda: self.sha256)

    @cached_property
    def growth(self) -> Growth:
        """The size of the graph after its functions are inlined; the model is judged by this.

        Raises:
            UsageError: no engine may see it, as `judgement` says.
        """
        try:
            return judgement.judge(self.model, self.size, self.data_size)
        except Refused as error:
            raise UsageError(f"{self.name} cannot be loaded.", why=error.why, fix=error.fix) from error

    def data_size(self, location: str) -> int | None:
        """Return the size in bytes of a file of external data, by its location in the model; None if there is none."""
        state = None
        if self.path is not None:
            path = self.path.parent / location
            state = self._read if location == self.path.name and self._read else _state(path)
        return None if state is None else state[2]

    def check(self) -> None:
        """Refuse a file that no engine may open.

        Weights outside the model's folder would let a model read any file of the machine. Functions that call each
        other too often, and loops without end, would keep the engine busy forever. Sizes that do not fit the bytes
        that are there would take all memory.

        Raises:
            UsageError: it is such a file, no ONNX model, or its external data is not a regular file.
        """
        _ = self._states
        _ = self.growth
        if self.path is not None:
            for location in sorted(self.locations):
                check_plain(self.path.parent / location)
        _ = self._places

    def check_without_overloads(self, engine: str) -> None:
        """Refuse a file that no engine may open, or that an engine without overloads of functions cannot open.

        TensorRT-RTX 1.7 calls itself without end where a function calls another one of its name.

        Raises:
            UsageError: it is such a file.
        """
        self.check()
        try:
            judgement.growth(self.model, judgement.functions_of(self.model), self.size, overloads=False)
        except Refused as error:
            why = f"{engine} does not distinguish functions by overload. {error.why}"
            raise UsageError(f"{self.name} cannot be loaded.", why=why, fix=error.fix) from error

    def check_same(self) -> None:
        """Refuse a file or external data that changed since it was checked; call this after opening it.

        Raises:
            CheckFailed: it was changed.
        """
        for path, state in self._states.items():
            if _state(path) != state:
                raise CheckFailed(
                    f"{path} changed while it was opened.",
                    why="The file that was checked is not the file that was loaded.",
                    fix="Try again when no program writes to it.",
                )


def _copy(model: Any) -> Any:
    copy = type(model)()
    copy.CopyFrom(model)
    return copy


def _no_model(name: str, why: str) -> NotAModel:
    return NotAModel(f"{name} is not an ONNX model.", why=why, fix="Copy it again, or export it again.")


def _state(path: Path | int) -> _State | None:
    """Return a state that changes whenever a file's content does; None if there is no file."""
    try:
        found = os.fstat(path) if isinstance(path, int) else path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
