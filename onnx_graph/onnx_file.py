"""Read and hash an ONNX file once, so that every check of a command sees the bytes that are opened later."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.errors import CheckFailed, UsageError
from ..core.storage.mistaken import START as MISTAKEN_START
from ..core.storage.mistaken import refuse_mistaken
from ..core.storage.publishing import check_unchanged
from ..core.storage.reading import check_plain, open_plain
from .loops import LOOP, check_loops
from .wire_scan import MOST_NODES, Scan, lies_inside, scan

# Larger files stay on the disk: they are hashed in blocks and opened by their path.
IN_MEMORY = 16 << 20
_BLOCK = 1 << 20
# A protobuf message has no more bytes than this.
_LARGEST = 1 << 31
_log = logging.getLogger(__name__)

# Device, inode, size, and the times of the last changes of content and of anything else, in nanoseconds.
_State = tuple[int, int, int, int, int]


class NotAModel(UsageError):
    """The file was read, but holds no ONNX model."""


class OnnxFile:
    """An ONNX model and where it lies; made by `read` or `of_bytes`.

    A model of up to `IN_MEMORY` bytes is in memory, and an engine gets these bytes. Larger models and external data
    stay on the disk: `check_same` refuses them if they were changed since they were checked.

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
            UsageError: there is no such file, or it cannot be read: it is no plain file, or larger than any model.
        """
        if isinstance(path, OnnxFile):
            return path
        path = Path(path)
        try:
            with open_plain(path) as stream:
                size = os.fstat(stream.fileno()).st_size
                _log.debug("reading %s, %d bytes", path, size)
                if size > _LARGEST:
                    raise _no_model(str(path), "It is larger than 2 GiB, the most that an ONNX file holds.")
                if size > IN_MEMORY:
                    return cls(path, None, size, os.dup(stream.fileno()))
                content = stream.read(IN_MEMORY + 1)
                refuse_mistaken(path, content[:MISTAKEN_START])
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise UsageError(f"Cannot read {path}.", why=why) from error
        if len(content) > IN_MEMORY:
            raise UsageError(f"Cannot read {path}.", why="It grew meanwhile.", fix="Try again when it is complete.")
        return cls(path, content, len(content))

    @classmethod
    def of_bytes(cls, content: bytes) -> OnnxFile:
        """Make an `OnnxFile` of a serialized model in memory."""
        return cls(None, content, len(content))

    def rewritten(self, model: Any) -> OnnxFile:
        """Return a rewrite of this file in its place: it refers to the same external data."""
        content = model.SerializeToString()
        found = OnnxFile(self.path, content, len(content))
        found._states = self._states
        return found

    def __fspath__(self) -> str:
        return self.name

    @property
    def content(self) -> str | bytes:
        """What an engine opens: the bytes that were read, or the path of a file too large for memory."""
        return self.name if self._data is None else self._data

    @property
    def folder(self) -> Path | None:
        """The folder of external data: that of the path that was given, even if the path is a link."""
        return None if self.path is None else self.path.absolute().parent

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
    def scan(self) -> Scan:
        """Operators, number of nodes, and places of external data."""
        if self._data is not None:
            return scan(self._data)
        # Not kept: pages of a mapping that were touched count as memory of the process, two megabytes for each touch.
        with mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) as mapped:
            return scan(mapped)

    @cached_property
    def _states(self) -> dict[Path, _State | None]:
        """State of the files on the disk: of the model when it was read, of its data at the first use of this."""
        if self.path is None:
            return {}
        beside = {self.path.parent / location for location in self.scan.locations if lies_inside(location)}
        return {path: _state(path) for path in beside} | ({} if self._read is None else {self.path: self._read})

    def parse(self) -> Any:
        """Parse the file into a new `onnx.ModelProto`, without its external data.

        Raises:
            NotAModel: it is another kind of file, or incomplete.
        """
        import onnx
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

        try:
            # Not `onnx.load(path)`, which takes a file named .json or .txt for another format.
            model = onnx.load_model_from_string(b"".join(self._blocks(self.size)))
        except (DecodeError, ValueError) as error:
            raise _no_model(self.name, "It is cut, or is another kind of file.") from error
        if not model.HasField("graph") or not model.ir_version:
            # An empty file, and some others, parse as an empty message.
            raise _no_model(self.name, "It holds no graph.")
        return model

    def check_unchanged(self) -> None:
        """Refuse a file that is not the one that the sidecar beside it was written for.

        Raises:
            CheckFailed: the SHA-256 of the file or of its external data differs.
        """
        if self.path is not None:
            _ = self._states
            check_unchanged(self.path, lambda: self.sha256)

    def check(self) -> None:
        """Refuse a file that no engine may open; files that are no ONNX models are left to the engine.

        Weights outside the model's folder would let a model read any file of the machine. Functions that call each
        other too often, and loops without end, would keep the engine busy forever.

        Raises:
            UsageError: it is such a file, or its external data is no plain file.
        """
        _ = self._states
        outside = sorted(location for location in self.scan.locations if not lies_inside(location))
        if outside:
            raise UsageError(
                f"{self.name} cannot be loaded.",
                why=f"It takes weights from {outside[0][:100]!r}, which is no file of its folder.",
                fix="Keep the external data file beside the model, under its original name.",
            )
        if self.path is not None:
            for location in sorted(self.scan.locations):
                check_plain(self.path.parent / location)
        if self.scan.inlined_nodes > MOST_NODES:
            raise UsageError(
                f"{self.name} cannot be loaded.",
                why=f"Its functions call each other so often that it would become more than {MOST_NODES} nodes.",
                fix="Export the model again; this file was not made by an exporter.",
            )
        if any(op_type == LOOP for _, op_type in self.scan.operators):
            with contextlib.suppress(NotAModel):
                check_loops(self.parse(), self.name)

    def check_same(self) -> None:
        """Refuse a file, or external data, that was changed since it was checked; called once it is open.

        Raises:
            CheckFailed: it was changed.
        """
        for path, state in self._states.items():
            if _state(path) != state:
                raise CheckFailed(
                    f"{path} was changed while it was opened.",
                    why="What was checked is not what was loaded.",
                    fix="Try again when nothing writes there any more.",
                )


def _no_model(name: str, why: str) -> NotAModel:
    return NotAModel(f"{name} is not an ONNX model.", why=why, fix="Copy it again, or export it again.")


def _state(path: Path | int) -> _State | None:
    """Return what changes whenever a file's content does; None where there is no file."""
    try:
        found = os.fstat(path) if isinstance(path, int) else path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
