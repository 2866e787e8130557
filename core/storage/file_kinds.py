"""Recognize the kind of a path by its suffix, and the kind of a file by its first bytes.

A command replaces a file only with one of the same kind: `Kind` says which names and which contents belong to it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError

# Suffixes of configurations, which may have the stem of their checkpoint.
CONFIG_SUFFIXES = (".json", ".toml", ".yaml", ".yml")
# Enough for every magic number here; JSON is read whole, up to the size limit of a sidecar.
_START = 4096
_LARGEST_JSON = 16 << 20

# Contents that `contents_of` distinguishes, as error messages call them.
NOTHING = "an empty file"
ARRAYS = "an .npz file"
CHECKPOINT = "a PyTorch checkpoint"
SAFETENSORS = "a safetensors checkpoint"
MODEL = "an ONNX file"
PROGRAM = "a library or program"
ARCHIVE = "a tar"
ZIP = "a ZIP archive"
SIDECAR_OR_MANIFEST = "the sidecar of a model, engine or library, or the manifest of a bundle"
CONFIG = "the configuration of a model"
REPORT = "a JSON report"
DOCUMENT = "another JSON document"
PAGE = "an HTML page"
TIMES = "a timing cache"
TEXT = "a text"
UNKNOWN = "a file of another kind"


@dataclass(frozen=True)
class Kind:
    """A kind of output.

    Args:
        name: how errors name it, with its article: "an ONNX file".
        suffixes: the suffixes of its names, in lower case; if empty, every suffix that no other kind has.
        contents: what an existing file must contain to be replaced by one of this kind, as `contents_of` returns it.
        has_sidecar: whether a sidecar (`NAME.json`) is written for it.
        folder: whether a folder of this name may exist; it is checked by the code that writes into it.
        extended: whether an existing file is extended without --force; it must already be of this kind and not empty.
        with_main: whether it is published together with the main output, whose sidecar describes it.
    """

    name: str
    suffixes: tuple[str, ...]
    contents: frozenset[str]
    has_sidecar: bool = False
    folder: bool = False
    extended: bool = False
    with_main: bool = False


ONNX = Kind("an ONNX file", (".onnx",), frozenset({MODEL}), has_sidecar=True)
ENGINE = Kind("an engine", (".engine",), frozenset({UNKNOWN}), has_sidecar=True)
LIBRARY = Kind("a library", (".so",), frozenset({PROGRAM}), has_sidecar=True)
COMPANION_LIBRARY = Kind("a library", (".so",), frozenset({PROGRAM}), with_main=True)
REWRITTEN = Kind("an ONNX file", (".onnx",), frozenset({MODEL}))  # without a sidecar
NPZ = Kind("an .npz file", (".npz",), frozenset({ARRAYS}))
JSON_REPORT = Kind("a JSON report", (".json",), frozenset({REPORT}))
MARKDOWN = Kind("a Markdown report", (".md",), frozenset({TEXT}))
HTML = Kind("an HTML report", (".html", ".htm"), frozenset({PAGE}))
SIDECAR = Kind("a sidecar", (".json",), frozenset({SIDECAR_OR_MANIFEST}))
CONFIGURATION = Kind("a configuration", (".json",), frozenset())  # never replaced
TAR = Kind("a tar", (), frozenset({ARCHIVE}))
BUNDLE = Kind("a bundle", (), frozenset({ARCHIVE}), folder=True)
FOLDER = Kind("a folder", (), frozenset(), folder=True)
TIMING_CACHE = Kind("a timing cache", (), frozenset({TIMES}), extended=True)

REPORTS = (JSON_REPORT, MARKDOWN, HTML)
# Suffixes that no kind without suffixes of its own may take.
_CLAIMED = {
    *(suffix for kind in (ONNX, ENGINE, LIBRARY, NPZ, *REPORTS) for suffix in kind.suffixes),
    *CONFIG_SUFFIXES,
    *(".pt", ".pth", ".bin", ".safetensors", ".data", ".py", ".txt", ".zip"),
}


def kind_named(path: Path, kinds: tuple[Kind, ...]) -> Kind | None:
    """Return the kind, of these, to which a path's name belongs; None if it belongs to none."""
    suffix = path.suffix.lower()
    for kind in kinds:
        if suffix not in kind.suffixes if kind.suffixes else suffix in _CLAIMED:
            continue
        if kind is JSON_REPORT and Path(path.stem).suffix.lower() in (*ONNX.suffixes, *ENGINE.suffixes, ".so"):
            continue  # the name of a sidecar
        return kind
    return None


def name_error(path: Path, kinds: tuple[Kind, ...]) -> UsageError:
    """Return the error to raise for a path whose name belongs to none of these kinds."""
    if path.name in ("", ".."):
        return UsageError(f"Cannot write {path}.", why="That is a folder, or an empty name.", fix="Give it a name.")
    known = [suffix for kind in kinds for suffix in kind.suffixes]
    return UsageError(
        f"{path} is not called {' or '.join(kind.name for kind in kinds)}.",
        why="The suffix tells what a file is, and NAME.onnx.json is the sidecar of NAME.onnx.",
        fix=f"Give it a name that ends in {', '.join(known)}." if known else "Choose another suffix, or none.",
    )


def default_configs(checkpoint: Path) -> list[Path]:
    """List the default paths of a checkpoint's configuration; the first that exists counts."""
    names = [stem + suffix for stem in (checkpoint.stem, "config") for suffix in CONFIG_SUFFIXES]
    return [checkpoint.with_name(name) for name in names if name != checkpoint.name]


def contents_of(path: Path) -> str:
    """Return what a regular file contains, as one of the constants above.

    Raises:
        OSError: it cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            return UNKNOWN
        start = stream.read(_START)
        if start.lstrip()[:1] in (b"{", b"[") and status.st_size <= _LARGEST_JSON:
            found = _json_contents(start + stream.read(_LARGEST_JSON))
            if found is not None:
                return found
    if _is_timing_cache(start, status.st_size):
        return TIMES
    return next((name for name, matches in _binary() if matches(start)), TEXT if _is_text(start) else UNKNOWN)


def _binary() -> Iterator[tuple[str, Callable[[bytes], bool]]]:
    """Yield kinds of content, each with the test of its first bytes; the first that matches counts."""
    yield NOTHING, lambda start: not start
    yield ARRAYS, _is_npz
    yield CHECKPOINT, _is_torch
    yield ZIP, lambda start: start.startswith(b"PK")
    yield SAFETENSORS, lambda start: start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32
    yield PROGRAM, lambda start: start.startswith((b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe"))
    yield ARCHIVE, lambda start: start[257:262] == b"ustar"
    yield MODEL, _is_onnx
    yield PAGE, lambda start: start.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html"))


def _first_member(start: bytes) -> bytes:
    """Return the name of the first member of a ZIP archive."""
    return start[30 : 30 + int.from_bytes(start[26:28], "little")] if start.startswith(b"PK\3\4") else b""


def _is_npz(start: bytes) -> bool:
    return start.startswith(b"PK\5\6") or _first_member(start).endswith(b".npy")


def _is_torch(start: bytes) -> bool:
    # A pickle begins with its protocol; torch's archives begin with a pickle, or with a file of torch's format.
    pickled = len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5
    member = _first_member(start)
    return pickled or member.endswith((b"/data.pkl", b"/version", b"/.format_version", b"/byteorder"))


def _is_onnx(start: bytes) -> bool:
    # ModelProto: the IR version (field 1, a small number), then any of the fields that may follow it.
    return len(start) > 2 and start[0] == 0x08 and start[1] < 0x40 and start[2] in b"\x12\x1a\x22\x28\x32\x3a\x42\x72"


def _is_timing_cache(start: bytes, size: int) -> bool:
    # Two headers are known: of TensorRT 10.3 on a Jetson Orin, 24 bytes, and of TensorRT-RTX 1.7, 20 bytes. Each states
    # how many bytes follow it. Engines of these releases begin with other letters.
    follow = {16: 24, 8: 20}  # where this number is, and the length of the header
    sizes = [int.from_bytes(start[place : place + 8], "little") + header for place, header in follow.items()]
    return start.startswith(b"ptrt") and size > max(follow.values()) and size in sizes


def _is_text(start: bytes) -> bool:
    if b"\0" in start:
        return False
    try:
        start[: _START - 4].decode("utf-8")
    except UnicodeDecodeError as error:
        return len(start) < _START and error.start >= len(start) - 3  # cut within a character
    return True


def _json_contents(text: bytes) -> str | None:
    """Return what kind of JSON document a text is; None if it is not JSON."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return DOCUMENT
    stated = str(document.get("format", ""))
    if stated.startswith("localattn-") and stated != "localattn-bench":
        return SIDECAR_OR_MANIFEST
    if "kwargs" in document:  # as in a configuration of a checkpoint
        return CONFIG
    return REPORT if stated.startswith("localattn-") or {"passed", "windows"} & document.keys() else DOCUMENT
