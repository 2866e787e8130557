"""Recognize wrong files given as a model: missing files, names of the Hub, Git LFS pointers and bundles."""

from __future__ import annotations

import os
import re
import shlex
import zlib
from pathlib import Path

from ..errors import UsageError
from .reading import read_plain

# The first line of https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md.
_POINTER = b"version https://git-lfs.github.com/spec/"
_GZIP = b"\x1f\x8b"
# The header of a tar's first entry has the format's name at byte 257.
START = 512
# As the Hub writes a model's name: owner/model.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx", ".npz")


def check_exists(path: Path) -> None:
    """Refuse a path without a reachable file or folder, and a name of the Hugging Face Hub.

    Raises:
        UsageError: there is nothing of this name, or a folder on the way may not be searched.
    """
    name = path.as_posix()
    if _HUB_NAME.fullmatch(name) and path.suffix.lower() not in _WEIGHTS and not os.path.lexists(path.parent):
        raise UsageError(
            f"There is no folder {name}.",
            why="localattn downloads nothing; a model of the Hugging Face Hub is exported from a local folder.",
            fix=f"hf download {name} --local-dir {path.name}, then export {path.name}.",
        )
    try:
        path.stat()
    except FileNotFoundError as error:
        raise UsageError(f"Cannot read {path}.", why=f"{error.strerror}.", fix="Check the path.") from error
    except OSError as error:
        raise UsageError(f"Cannot read {path}.", why=f"{error.strerror}.") from error
    except ValueError:  # not a valid file name: opening it raises the error
        return


def refuse_wrong_file(path: Path, start: bytes | None = None, *, tars: bool = True) -> None:
    """Refuse a file that is not a model at all; damaged or unreadable files are reported by their reader.

    Args:
        path: the file.
        start: its first bytes; by default they are read.
        tars: whether a plain tar is refused too.

    Raises:
        UsageError: it is such a file; the text says how to get the model that was meant.
    """
    if start is None:
        try:
            start = read_plain(path, START)
        except (OSError, ValueError):
            return
    name = shlex.quote(str(path))
    if start.startswith(_POINTER):
        raise UsageError(
            f"{path} is a Git LFS pointer, not the file itself.",
            why="The repository was cloned without its large files.",
            fix=f"Fetch it, in the repository: git lfs pull --include {shlex.quote(path.name)}",
        )
    packed = start.startswith(_GZIP)
    if (tars or packed) and _is_tar(_unpacked(start) if packed else start):
        raise UsageError(
            f"{path} is a {'compressed ' if packed else ''}tar, not a model.",
            why="It may be a bundle, which has the model in its folder model/.",
            fix=f"Unpack it: tar x{'z' if packed else ''}f {name}, and give the path of the model in it. "
            + ("A folder is checked by" if packed else "It is checked by")
            + f": localattn bundle verify {'FOLDER' if packed else name}",
        )
    if packed:
        why = "Compressed files are not read."
        raise UsageError(f"{path} is compressed (gzip).", why=why, fix=f"Unpack it: gunzip {name}")


def _is_tar(start: bytes) -> bool:
    return start[257:262] == b"ustar"


def _unpacked(start: bytes) -> bytes:
    """Return the first unpacked bytes of a gzip file; none if it is broken."""
    try:
        return zlib.decompressobj(wbits=31).decompress(start, START)
    except zlib.error:
        return b""
