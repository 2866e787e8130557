"""Libraries that write a file when they are loaded, caches that hold them, and processes that may load them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

import localattn as package
from localattn.core.machine.processor import host_arch
from localattn.core.storage.library_store import CPU_KERNELS
from localattn.plugins.cpu.sidecar import CpuLibrarySidecar

# Loading it appends its word to the file that LOCALATTN_TEST_MARKER names: its constructor runs before anything else.
SOURCE = """
#include <cstdio>
#include <cstdlib>
__attribute__((constructor)) static void loaded() {
  const char* path = std::getenv("LOCALATTN_TEST_MARKER");
  std::FILE* file = path ? std::fopen(path, "a") : nullptr;
  if (file) { std::fputs(WORD "\\n", file); std::fclose(file); }
}
extern "C" void* RegisterCustomOps(void*, const void*) { return nullptr; }
extern "C" const char* localattn_instruction_set() { return "none"; }
"""
FACTS = CpuLibrarySidecar(host_arch(), "", 0, "", "g++", "2.31", "2026-01-01T00:00:00+00:00", {})


def compile_marker(folder: Path, word: str) -> Path:
    """Compile a shared object that writes this word when it is loaded; skip the test without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ compiles the libraries that show whether they were loaded")
    source, library = folder / f"{word}.cpp", folder / f"{word}.so"
    source.write_text(SOURCE)
    command = [compiler, "-shared", "-fPIC", f'-DWORD="{word}"', "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return library


def sidecar_of(library: Path) -> CpuLibrarySidecar:
    """Make a sidecar as this release writes it for such a library; anybody can write one."""
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    return replace(FACTS, sha256=digest, bytes=library.stat().st_size, fingerprint=CPU_KERNELS.fingerprint())


def copy_library(library: Path, place: Path) -> None:
    """Copy the library to a place, with a matching sidecar next to it."""
    shutil.copy(library, place)
    place.with_name(place.name + ".json").write_text(sidecar_of(library).to_json())


class Cache(NamedTuple):
    """The parts of a cache, below the folder that XDG_CACHE_HOME names."""

    base: Path

    @property
    def folder(self) -> Path:
        return self.base / "localattn" / "plugins"

    @property
    def index(self) -> Path:
        return self.folder / "index.json"

    @property
    def library(self) -> Path:
        return self.folder / host_arch() / CPU_KERNELS.file_name

    def everything(self) -> list[Path]:
        """The base and all below."""
        return [self.base, *self.base.rglob("*")]

    def write_index(self, path: str, sidecar: CpuLibrarySidecar) -> None:
        """An index of one library."""
        entry = {"path": path, "kind": CPU_KERNELS.name, "facts": sidecar.to_dict()}
        document = {"format": "localattn-libraries", "format_version": 1, "libraries": [entry]}
        self.index.write_text(json.dumps(document))


def fill(base: Path, library: Path) -> Cache:
    """Make a cache as a build leaves it, every part private, with this library as the one that was built."""
    cache = Cache(base)
    cache.library.parent.mkdir(parents=True)
    copy_library(library, cache.library)
    cache.write_index(f"{host_arch()}/{CPU_KERNELS.file_name}", sidecar_of(library))
    for path in cache.everything():
        path.chmod(0o700 if path.is_dir() else 0o600)
    return cache


class Ended(NamedTuple):
    """How a process ended, and which libraries were loaded in it."""

    code: int
    out: str
    err: str
    loaded: list[str]


def run(folder: Path, *arguments: object, cwd: Path | None = None, **environment: str) -> Ended:
    """Run Python with almost no environment, and see what it loaded.

    Args:
        folder: for the marker and for what else must be there.
        arguments: of Python.
        cwd: the current folder.
        environment: beside the path and the marker; nothing else is passed on.
    """
    marker = folder / "marker"
    marker.write_text("")
    marker.chmod(0o666)
    (folder / "import").mkdir(exist_ok=True)
    link = folder / "import" / "localattn"
    if not link.is_symlink():
        link.symlink_to(Path(package.__file__).parent)
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(link.parent), "LOCALATTN_TEST_MARKER": str(marker)}
    finished = subprocess.run(
        [sys.executable, "-B", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=given | {"HOME": str(folder / "nobody")} | environment,
        cwd=cwd or folder,
        check=False,
    )
    return Ended(finished.returncode, finished.stdout, finished.stderr, marker.read_text().split())


def command(folder: Path, *words: object, cwd: Path | None = None, **environment: str) -> Ended:
    """Run the command line so."""
    return run(folder, "-m", "localattn.cli", *words, cwd=cwd, **environment)
