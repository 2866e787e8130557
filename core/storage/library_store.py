"""Find libraries of compiled kernels that may be loaded automatically, and load libraries safely.

A library is code. It is loaded automatically only from an installed package or from the user's own cache, where
nobody else can write (`core/storage/exposed.py`) and whose index, apart from the library, holds its SHA-256. Every
other library is loaded only when the user names it. Either way the file is read once, and the bytes that were read and
compared are those that the dynamic loader gets (`core/storage/library_image.py`). `find` and `read_named` are the two
ways in; a kind of library is a row in `KINDS`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import site
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CheckFailed, LocalAttnError, UsageError
from ..machine.processor import host_arch, refuse_foreign
from .exposed import why_exposed
from .files import publish, work_folder
from .fingerprints import fingerprint_of
from .library_image import loadable, read_regular_file
from .publishing import MAX_BYTES, sidecar_path

_log = logging.getLogger(__name__)

# Values of a `plugin` argument besides a path: a library that may be loaded automatically, or none.
AUTO, NONE = "auto", "none"

# Where wheels for one processor contain libraries, each in a folder named as the processor. Whoever can write here can
# change the code that runs now, so owners and modes are not checked.
_PACKAGED = Path(__file__).resolve().parents[2] / "libraries"
# The package of the distribution localattn-plugin-library, laid out in the same way.
_LIBRARY_PACKAGE = "localattn_plugin_library"
_INDEX = "index.json"
_FORMAT, _FORMAT_VERSION = "localattn-libraries", 1
_MOST_KEPT = 100


@dataclass(frozen=True)
class LibraryKind:
    """A kind of library.

    Args:
        name: its name in the index, and its role in a bundle.
        title: its name in errors.
        file_name: file name of the library.
        format: the entry `format` in the sidecar of such a library.
        how_to_build: the command that builds one.
    """

    name: str
    title: str
    file_name: str
    format: str
    how_to_build: str

    @property
    def build_again(self) -> str:
        """Say what to do about a library that was changed after it was built."""
        return f"Build it again: {self.how_to_build} --force"

    def fingerprint(self) -> str:
        """Return the digest of such a library's sources in this release."""
        return fingerprint_of(self.name)


CPU_KERNELS = LibraryKind(
    "kernels",
    "library of kernels for onnxruntime",
    "liblocalattn_onnxruntime.so",
    "localattn-onnxruntime",
    "localattn plugin build --backend onnxruntime",
)
TENSORRT_PLUGIN = LibraryKind(
    "plugin",
    "plugin library",
    "liblocalattn_plugin.so",
    "localattn-plugin",
    "localattn plugin build",
)
KINDS = {kind.name: kind for kind in (CPU_KERNELS, TENSORRT_PLUGIN)}


@dataclass(frozen=True)
class Library:
    """A library that was read and verified and can be loaded.

    Args:
        kind: what it is for.
        path: where it was read.
        sha256: SHA-256 of the bytes read.
        sidecar: its sidecar; empty if a library that the user named has none.
        image: the path that the loader gets: it leads to these bytes and to no others.
    """

    kind: LibraryKind
    path: Path
    sha256: str
    sidecar: Mapping[str, Any] = field(repr=False)
    image: str = field(repr=False)

    def in_words(self, message: object) -> str:
        """Write a loader's message in one line, with the library's own path instead of the image's."""
        return " ".join(str(message).replace(self.image, str(self.path)).split())


@dataclass(frozen=True)
class StoredLibrary:
    """A library that may be loaded automatically but was not read yet.

    Args:
        kind: what it is for.
        path: its path.
        sidecar: from the index of the cache, or from an installed package.
        packaged: whether it is in an installed package.
    """

    kind: LibraryKind
    path: Path
    sidecar: Mapping[str, Any]
    packaged: bool = False

    def read(self) -> Library:
        """Read the library once and verify it.

        Raises:
            CheckFailed: others can write it, or it is not the one that was built.
        """
        try:
            exposed = "" if self.packaged else why_exposed(self.path)
            data = b"" if exposed else read_regular_file(self.path)
        except OSError as error:
            why = error.strerror or str(error)
            raise CheckFailed(f"{self.path} cannot be read.", why=why, fix=self.kind.build_again) from error
        if exposed:
            raise _exposed(self.path, exposed)
        place = "next to it" if self.packaged else "in the index of the cache"
        return _verified(self.kind, self.path, data, self.sidecar, place)


def find(
    kind: LibraryKind,
    *,
    arch: str = "",
    this_release: bool = True,
    sha256: str | None = None,
    wanted: Callable[[Mapping[str, Any]], bool] = lambda _: True,
) -> Library | None:
    """Find the newest verified library that may be loaded automatically; None if there is none.

    Args:
        kind: what it is for.
        arch: processor; "" for this machine's.
        this_release: only one made from the sources of this release.
        sha256: only the one with this digest.
        wanted: returns whether a library with this sidecar is suitable.

    Raises:
        CheckFailed: others can write to the cache, or no suitable library passes verification; the first is named.
        UsageError: no library can be built for this machine.
    """
    arch = arch or host_arch()
    refused: list[CheckFailed] = []
    for stored in candidates(kind):
        sidecar = stored.sidecar
        if sidecar["arch"] != arch or sha256 not in (None, sidecar["sha256"]):
            continue
        if (this_release and sidecar["fingerprint"] != kind.fingerprint()) or not wanted(sidecar):
            _log.debug("%s: not for this use", stored.path)
            continue
        try:
            library = stored.read()
        except CheckFailed as error:
            _log.debug("%s: refused: %s", stored.path, error)
            refused.append(error)
            continue
        _log.info("%s: verified, and used", stored.path)
        return library
    if refused:
        raise refused[0]
    return None


def read_named(kind: LibraryKind, path: Path) -> Library:
    """Read a library that the user names: any path, and any library for this processor.

    If it has a sidecar, the sidecar must be of this kind and of this file.

    Raises:
        UsageError: the file is missing, is not a library for this processor, or has a sidecar of another kind.
        CheckFailed: it is not the file that its sidecar was written for.
    """
    try:
        data = read_regular_file(path, follow_link=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path} cannot be read.", why=f"{why}.") from error
    refuse_foreign(path, data)
    sidecar = read_library_sidecar(kind, path) if sidecar_path(path).exists() else {}
    return _verified(kind, path, data, sidecar, "in the file next to it")


def _verified(kind: LibraryKind, path: Path, data: bytes, sidecar: Mapping[str, Any], place: str) -> Library:
    """Compare the bytes of a library with its sidecar, and return a path for the loader with exactly these bytes.

    Args:
        kind: what the library is for.
        path: where it was read.
        data: its bytes.
        sidecar: its sidecar; empty if it has none.
        place: where the sidecar is, for the error.

    Raises:
        CheckFailed: the sidecar was not written for these bytes.
        UsageError: no copy for the loader can be made.
    """
    digest = hashlib.sha256(data).hexdigest()
    if sidecar and sidecar["sha256"] != digest:
        raise CheckFailed(
            f"{path} was changed after it was built.", why=f"Its SHA-256 is not the one {place}.", fix=kind.build_again
        )
    try:
        image = loadable(data, kind.file_name)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"{path} cannot be loaded.", why=f"It cannot be copied: {why}.") from error
    return Library(kind, path, digest, sidecar, image)


def candidates(kind: LibraryKind) -> Iterator[StoredLibrary]:
    """List libraries that may be loaded automatically: those in the user's cache, newest first, then installed ones.

    Raises:
        CheckFailed: others can write the index of the cache.
    """
    folder = cache_folder()
    for path, entry in reversed(_entries(folder)) if folder else ():
        if entry["kind"] == kind.name and _is_sidecar(kind, entry.get("facts")) and path.exists():
            yield StoredLibrary(kind, path, entry["facts"])
    for path in (path for installed in _installed() for path in _lying_in(installed, kind)):
        try:
            yield StoredLibrary(kind, path, read_library_sidecar(kind, path), packaged=True)
        except LocalAttnError as error:
            _log.debug("%s: %s", path, error)


def _installed() -> Iterator[Path]:
    """List the folders of libraries that were installed with pip.

    Besides the package's own that is one in the folders of this Python's packages. It is not looked for on `sys.path`,
    which may lead to the folder that a process happens to run in.
    """
    yield _PACKAGED
    user = [sysconfig.get_preferred_scheme("user")] if site.ENABLE_USER_SITE else []
    schemes = [sysconfig.get_default_scheme(), *user]
    yield from dict.fromkeys(Path(sysconfig.get_path("platlib", scheme)) / _LIBRARY_PACKAGE for scheme in schemes)


def _lying_in(folder: Path, kind: LibraryKind) -> list[Path]:
    """List the libraries of a kind in a folder; a folder that this user cannot read counts as empty."""
    try:
        return sorted(folder.glob(f"*/{kind.file_name}"))
    except OSError as error:
        _log.debug("%s: %s", folder, error)
        return []


def read_library_sidecar(kind: LibraryKind, library: Path) -> dict[str, Any]:
    """Read the sidecar of a library.

    Raises:
        UsageError: there is no sidecar, or it cannot be read, or it is of another kind.
    """
    path = sidecar_path(library)
    try:
        sidecar = json.loads(read_regular_file(path, MAX_BYTES, follow_link=True))
    except FileNotFoundError as error:
        raise UsageError(f"{path} is missing.", fix=f"Build a library with: {kind.how_to_build}") from error
    except OSError as error:
        why = f"{error.strerror or error}."
        raise UsageError(f"{path} cannot be read.", why=why, fix=kind.build_again) from error
    except (ValueError, RecursionError):
        sidecar = None
    if not _is_sidecar(kind, sidecar):
        raise UsageError(f"{path} does not describe a {kind.title}.")
    return dict(sidecar)


def kind_of(library: Path) -> LibraryKind | None:
    """Find the kind of a library by its sidecar; None if that does not say."""
    try:
        sidecar = json.loads(read_regular_file(sidecar_path(library), MAX_BYTES, follow_link=True))
    except (OSError, ValueError, RecursionError):
        return None
    stated = sidecar.get("format") if isinstance(sidecar, dict) else None
    return next((kind for kind in KINDS.values() if kind.format == stated), None)


def cache_folder() -> Path | None:
    """Return the cache folder for libraries; None for a user without a home.

    A relative `XDG_CACHE_HOME` counts as none, as the XDG Base Directory Specification wants it: it would be found in
    whatever folder the process runs in.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # no HOME, and no entry in the system's list of users
        return None
    return base / "localattn" / "plugins" if base.is_absolute() else None


def prepare_cache(arch: str) -> Path:
    """Make the folder for libraries of a processor, open to this user alone, and return it.

    Raises:
        UsageError: the folder cannot be made, or others can write to it.
    """
    folder = cache_folder()
    elsewhere = "Choose another path for the library, and give that path where the library is used."
    if folder is None:
        raise UsageError(
            "There is no cache folder for libraries.", why="HOME and XDG_CACHE_HOME are not set.", fix=elsewhere
        )
    try:
        folder.parents[1].mkdir(mode=0o700, parents=True, exist_ok=True)
        for made in (folder.parent, folder, folder / arch):
            made.mkdir(mode=0o700, exist_ok=True)
            if made.stat().st_mode & 0o077:
                made.chmod(0o700)
        exposed = why_exposed(folder / arch)
    except OSError as error:
        why = f"{error.filename or folder}: {error.strerror or error}."
        raise UsageError(f"Libraries cannot be kept in {folder}.", why=why, fix=elsewhere) from error
    if exposed:
        raise UsageError(f"Libraries cannot be kept in {folder}.", why=exposed, fix=elsewhere)
    return folder / arch


def keep(kind: LibraryKind, library: Path, sidecar: Mapping[str, Any]) -> bool:
    """Add a new library to the index of the cache; return whether it is in the cache.

    A library outside the cache is not added: it is used only when named.
    """
    folder = cache_folder()
    if folder is None or library.absolute().parent.parent != folder:
        return False
    library.chmod(library.stat().st_mode & ~0o022)  # a umask of 002 lets the group write
    index = folder / _INDEX
    with work_folder(index, wait=True) as work:  # read under the lock, to keep others' entries
        kept = [(path, entry) for path, entry in _entries(folder) if path != library.absolute()]
        kept.append((library.absolute(), {"kind": kind.name, "facts": dict(sidecar)}))
        entries = [{"path": path.relative_to(folder).as_posix(), **entry} for path, entry in kept if path.exists()]
        document = {"format": _FORMAT, "format_version": _FORMAT_VERSION, "libraries": entries[-_MOST_KEPT:]}
        staged = work / index.name
        staged.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        staged.chmod(0o600)
        publish(staged, index)
    return True


def _entries(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Read paths and entries of the index, in the order of the builds; return none if the index is invalid.

    Raises:
        CheckFailed: others can write it.
    """
    index = folder / _INDEX
    try:
        exposed = why_exposed(index)
        document = None if exposed else json.loads(read_regular_file(index, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        _log.debug("%s: %s", index, error)
        return []
    if exposed:
        raise _exposed(folder, exposed)
    if not isinstance(document, dict) or document.get("format_version") != _FORMAT_VERSION:
        return []
    listed = document.get("libraries")
    found = map(partial(_entry, folder), listed if isinstance(listed, list) else ())
    return [entry for entry in found if entry is not None]


def _entry(folder: Path, item: object) -> tuple[Path, dict[str, Any]] | None:
    """Split an entry into its path and the rest; None if it is invalid or leads out of the cache."""
    if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in ("path", "kind")):
        return None
    if item["kind"] not in KINDS:
        return None
    parts = item["path"].split("/")
    if len(parts) != 2 or any(part in ("", ".", "..") or "\0" in part for part in parts):
        return None
    return folder.joinpath(*parts), {name: value for name, value in item.items() if name != "path"}


def _is_sidecar(kind: LibraryKind, sidecar: object) -> bool:
    """Check that a sidecar is of this kind of library, with every entry that is used here."""
    if not isinstance(sidecar, dict) or sidecar.get("format") != kind.format:
        return False
    return all(isinstance(sidecar.get(name), str) for name in ("arch", "sha256", "fingerprint"))


def _exposed(place: Path, why: str) -> CheckFailed:
    return CheckFailed(
        f"No library is loaded from {place}.",
        why=why,
        fix="Make it your own and writable by nobody else (chown, chmod go-w), or name the library that you trust.",
    )
