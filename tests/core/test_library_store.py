"""The index of libraries in the user's cache: what is entered at the same time, and entries that nobody wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from localattn.core.errors import UsageError
from localattn.core.storage import library_store
from localattn.core.storage.file_kinds import contents_of
from localattn.core.storage.library_image import read_regular_file
from localattn.core.storage.library_store import (
    CPU_KERNELS,
    TENSORRT_PLUGIN,
    LibraryKind,
    candidates,
    keep,
    read_library_sidecar,
)

_OPEN = Path("/proc/self/fd")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no libraries in the packages of this Python."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library_store, "_installed", lambda: iter(()))
    return library_store.prepare_cache("x86_64")


def entered(kind: LibraryKind, folder: Path) -> Path:
    """A file in place of a library that was just built, entered into the index."""
    path = folder / kind.file_name
    path.write_bytes(b"library")
    sidecar = {"format": kind.format, "arch": "x86_64", "sha256": "", "fingerprint": ""}
    assert keep(kind, path, sidecar)
    return path


def found(kind: LibraryKind) -> list[Path]:
    return [stored.path for stored in candidates(kind)]


def test_two_builds_that_end_at_the_same_time_are_both_entered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_folder = library_store.work_folder

    @contextmanager
    def after_another(target: Path, **options: Any) -> Iterator[Path]:
        """The index's lock, which another build had before."""
        monkeypatch.setattr(library_store, "work_folder", work_folder)
        entered(TENSORRT_PLUGIN, cache)
        with work_folder(target, **options) as folder:
            yield folder

    monkeypatch.setattr(library_store, "work_folder", after_another)
    mine = entered(CPU_KERNELS, cache)
    assert found(CPU_KERNELS) == [mine]
    assert found(TENSORRT_PLUGIN) == [cache / TENSORRT_PLUGIN.file_name]


@pytest.mark.parametrize(
    "entry",
    [None, [], {}, {"path": 1}, {"path": "x86_64/a.so", "kind": ["kernels"]}, {"path": "../a", "kind": "kernels"}],
)
def test_entries_that_nobody_wrote_are_left_out(entry: object, cache: Path) -> None:
    mine = entered(CPU_KERNELS, cache)
    index = cache.parent / "index.json"
    document = json.loads(index.read_text())
    document["libraries"].append(entry)
    index.write_text(json.dumps(document))
    assert found(CPU_KERNELS) == [mine]


def test_a_sidecar_that_cannot_be_read_is_not_called_missing(tmp_path: Path) -> None:
    library = tmp_path / CPU_KERNELS.file_name
    with pytest.raises(UsageError, match=r"\.so\.json is missing\."):
        read_library_sidecar(CPU_KERNELS, library)
    library.with_name(f"{library.name}.json").mkdir()
    with pytest.raises(UsageError, match=r"\.so\.json cannot be read\.\nIs a directory\."):
        read_library_sidecar(CPU_KERNELS, library)


@pytest.mark.skipif(not _OPEN.exists(), reason="Linux lists the open files of a process")
@pytest.mark.parametrize("read", [read_regular_file, contents_of])
def test_a_folder_in_place_of_a_file_is_not_left_open(read: Callable[[Path], object], tmp_path: Path) -> None:
    before = sorted(_OPEN.iterdir())
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
    assert sorted(_OPEN.iterdir()) == before
