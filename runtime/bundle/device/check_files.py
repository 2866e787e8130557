"""Read the manifest of a bundle and check its files against it; needs only the standard library.

Nothing of a bundle is loaded before these checks: first the paths, then the set of files, their sizes and SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ALTERED, NO_BUNDLE, MISSING = 1, 2, 3
MANIFEST = "manifest.json"
MAX_MANIFEST = 16 << 20
MAX_FILES = 10_000

Report = dict[str, Any]


class Fault(Exception):
    """An error with what happened, why, what to do about it, and the exit code of the script."""

    def __init__(self, code: int, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.code, self.what, self.why, self.fix = code, what, why, fix


_TENSOR = {"name": str, "dtype": str, "shape": [(int, str)]}
_TOLERANCE = {"atol": (int, float), "rtol": (int, float), "cosine": (int, float, type(None))}
_MODEL = {
    "path": str,
    "kind": str,
    "samples_of": str,
    "tolerance": _TOLERANCE,
    "inputs": [_TENSOR],
    "outputs": [_TENSOR],
    "backend": str,
    "backend_version": str,
    "compute_capability": str,
    "plugins": [str],
}
_SCHEMA = {
    "format": str,
    "format_version": int,
    "name": str,
    "files": [{"path": str, "size": int, "sha256": str, "role": str}],
    "models": [_MODEL],
    "samples": [{"model": str, "inputs": str, "outputs": str, "source": str}],
}
_LARGEST = (1 << 63) - 1
_KINDS = ("onnx", "engine")
_HEX = re.compile("[0-9a-f]{64}")
# Names that Windows reserves for devices, with any suffix.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def parse_manifest(text: bytes) -> Report:
    """Parse a manifest, and check its types, paths and references.

    Raises:
        Fault: it is not a manifest, has another version, or contradicts itself; the first problem is named.
    """
    try:
        manifest = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
        _check_types(manifest, _SCHEMA, "manifest")
        if (manifest["format"], manifest["format_version"]) != ("localattn-bundle", 1):
            raise ValueError(f"it is {manifest['format'][:40]!r} version {manifest['format_version']}")
        if path_problem(manifest["name"]) or "/" in manifest["name"]:
            raise ValueError(f"its name {manifest['name'][:100]!r} is not a valid folder name")
        _check_files(manifest["files"])
        _check_references(manifest)
    except (ValueError, RecursionError) as error:
        why = (str(error).splitlines() or ["it is nested too deeply"])[0][:300]
        raise Fault(NO_BUNDLE, f"{MANIFEST} is not the manifest of a bundle.", why, "Copy the bundle again.") from error
    return dict(manifest)


def read_expected(text: bytes, expected: str | None) -> tuple[Report, str]:
    """Parse a manifest, which must have the SHA-256 `expected` if given; return it and its SHA-256.

    Raises:
        Fault: it is another one, or as of `parse_manifest`.
    """
    digest = hashlib.sha256(text).hexdigest()
    if expected not in (None, digest):
        raise Fault(ALTERED, f"{MANIFEST} is not the expected one.", f"Its SHA-256 is {digest}.")
    return parse_manifest(text), digest


def _unique(pairs: list[tuple[str, Any]]) -> Report:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("it has a key twice")
    return dict(pairs)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _check_types(value: Any, schema: Any, place: str) -> None:
    """Compare a value with a schema: a dict names the required keys, a list has the schema of its items."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{place} is not an object")
        for name, inner in schema.items():
            if name not in value:
                raise ValueError(f"{place} has no {name!r}")
            _check_types(value[name], inner, f"{place}.{name}")
    elif isinstance(schema, list):
        if not isinstance(value, list) or len(value) > MAX_FILES:
            raise ValueError(f"{place} is not a list of at most {MAX_FILES}")
        for index, item in enumerate(value):
            _check_types(item, schema[0], f"{place}[{index}]")
    elif not isinstance(value, schema) or isinstance(value, bool):
        raise ValueError(f"{place} is a {type(value).__name__}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place} is not finite")
    elif (
        isinstance(value, int) and not -_LARGEST <= value <= _LARGEST
    ):  # Python's integers have any size, floats do not
        raise ValueError(f"{place} is beyond 64 bits")


def _check_files(files: list[Report]) -> None:
    check_paths([MANIFEST, *(entry["path"] for entry in files)])
    for entry in files:
        if not (0 <= entry["size"] < 1 << 63) or not _HEX.fullmatch(entry["sha256"]):
            raise ValueError(f"{entry['path']!r} has no size or no SHA-256")


def _check_references(manifest: Report) -> None:
    listed = {entry["path"] for entry in manifest["files"]}
    models = {model["path"]: model for model in manifest["models"]}
    named = [path for model in manifest["models"] for path in (model["path"], *model["plugins"])]
    named += [sample[part] for sample in manifest["samples"] for part in ("model", "inputs", "outputs")]
    for path in named:
        if path not in listed:
            raise ValueError(f"{path[:100]!r} is used but not listed among its files")
    for model in models.values():
        source = models.get(model["samples_of"])
        if model["kind"] not in _KINDS or source is None or source["kind"] != "onnx":
            raise ValueError(
                f"model {model['path']!r} is of an unknown kind, or refers to the samples of a model that does not "
                "exist"
            )
        bounds = model["tolerance"]
        if min(bounds["atol"], bounds["rtol"]) < 0:
            raise ValueError(f"model {model['path']!r} has a negative tolerance")
    if len(models) != len(manifest["models"]) or any(sample["model"] not in models for sample in manifest["samples"]):
        raise ValueError("a model is listed twice, or a sample belongs to no model")


def check_paths(paths: list[str]) -> None:
    """Refuse names that would leave the folder, or that some file system treats as another name.

    Raises:
        ValueError: the first such name.
    """
    if len(paths) > MAX_FILES:
        raise ValueError(f"more than {MAX_FILES} files")
    folders: dict[str, str] = {}
    seen: set[str] = set()
    for path in paths:
        problem = path_problem(path)
        if problem:
            raise ValueError(f"path {path[:100]!r} {problem}")
        key = _fold(path)
        if key in seen:
            raise ValueError(f"path {path!r} occurs twice (or with other capitals)")
        seen.add(key)
        parts = path.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            if folders.setdefault(_fold(folder), folder) != folder:
                raise ValueError(f"folder {folder!r} occurs twice with other capitals")
    if seen & folders.keys():
        raise ValueError(f"path {min(seen & folders.keys())!r} is both a file and a folder")


def path_problem(path: str) -> str:
    """Return why a path may not be in a bundle; empty for a plain relative path with forward slashes."""
    if not path or len(path.encode("utf-8", "surrogatepass")) > 240:
        return "is empty or longer than 240 bytes"
    if not path.isprintable() or any(sign in path for sign in '\\:*?"<>|'):
        return "has a character that some file systems refuse"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return "is absolute, or leaves the folder"
        if part[-1] in ". " or _DEVICES.fullmatch(part):
            return "is not the same name on every file system"
    return ""


def _fold(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def read_manifest(folder: Path) -> bytes:
    """Return the bytes of the manifest in `folder`.

    Raises:
        Fault: there is no manifest, or it is a link or too large.
    """
    path = folder / MANIFEST
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise Fault(NO_BUNDLE, f"{path} is not a regular file.", "A link could lead anywhere.")
        with path.open("rb") as stream:
            text = stream.read(MAX_MANIFEST + 1)
    except (OSError, ValueError) as error:
        raise Fault(NO_BUNDLE, f"{folder} is not a bundle.", f"{MANIFEST}: {error}") from error
    if len(text) > MAX_MANIFEST:
        raise Fault(NO_BUNDLE, f"{folder} is not a bundle.", f"{MANIFEST} is larger than {MAX_MANIFEST >> 20} MiB.")
    return text


def check_folder(folder: Path, manifest: Report) -> None:
    """Compare a folder with its manifest: the same regular files, with the same size and SHA-256.

    Raises:
        Fault: a link or special file (2); a file missing, added or altered (1).
    """

    def blocks(path: str) -> Iterator[bytes]:
        with (folder / path).open("rb") as stream:
            while block := stream.read(1 << 20):
                yield block

    check_listed(manifest, dict(_plain_files(folder)), blocks)


def check_listed(manifest: Report, found: dict[str, int], blocks: Callable[[str], Iterable[bytes]]) -> None:
    """Compare files with a manifest.

    Args:
        manifest: parsed.
        found: the size of each file by path, the manifest's own too.
        blocks: returns the bytes of a file.

    Raises:
        Fault: a file is missing, added or altered.
    """
    listed = {entry["path"]: entry for entry in manifest["files"]}
    found.pop(MANIFEST, None)
    for title, names in (("is missing", listed.keys() - found.keys()), ("is not listed", found.keys() - listed.keys())):
        if names:
            raise Fault(ALTERED, f"{min(names)} {title}.", f"{len(names)} such file(s).", "Copy the bundle again.")
    for path, entry in listed.items():
        if found[path] != entry["size"]:
            raise _altered(path, f"It has {found[path]} bytes, not {entry['size']}.")
        check_bytes(path, entry, blocks(path))


def check_bytes(path: str, entry: Report, blocks: Iterable[bytes]) -> None:
    """Compare a file's bytes with the SHA-256 of its manifest entry."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    if digest.hexdigest() != entry["sha256"]:
        raise _altered(path, "Its SHA-256 differs from the manifest's.")


def _altered(path: str, why: str) -> Fault:
    what = f"{path} was changed after it was written."
    return Fault(ALTERED, what, why, "Copy the bundle again; do not use this one.")


def _plain_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield relative path and size of every file; never follows a link."""
    pending, count = [""], 0
    while pending:
        inner = pending.pop()
        for entry in os.scandir(folder / inner):
            path = f"{inner}/{entry.name}" if inner else entry.name
            count += 1
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                pending.append(path)
            elif stat.S_ISREG(mode):
                yield path, entry.stat(follow_symlinks=False).st_size
            else:
                raise Fault(NO_BUNDLE, f"{path!r} is not a regular file.", "A bundle has no links and no devices.")
            if count > 2 * MAX_FILES:
                raise Fault(NO_BUNDLE, f"{folder} has too many files for a bundle.")
