"""Small plugin libraries, built once a run, and C++ programs of `sources/` for either processor."""

from __future__ import annotations

import atexit
import json
import pickle
import shutil
import stat
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from localattn.core.errors import MissingDependency
from localattn.core.storage.library_store import TENSORRT_PLUGIN
from localattn.core.storage.publishing import sidecar_path
from localattn.plugins import compilers
from localattn.plugins.compilers import Compiler, find_compiler
from localattn.plugins.kernel.aft import AFT_SPECS
from localattn.plugins.kernel.compile import AnySpec, CompiledKernel, compile_tiles
from localattn.plugins.kernel.ring import JoinSpec, RingSpec
from localattn.plugins.kernel.spec import KernelSpec, full_set
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.library import build
from localattn.plugins.library.embed import to_compile
from localattn.plugins.library.headers import find_cuda_headers, find_tensorrt_headers
from localattn.plugins.library.sidecar import Arch, LibrarySidecar, host_arch, parse_sidecar

from ..run_folder import once

_TESTS = Path(__file__).parents[2]
_SOURCES = (_TESTS / "support" / "native" / "sources", _TESTS / "gpu" / "simulators" / "native")
DTYPE, HEAD_DIM = "fp16", 64
# What the libraries of the tests have of steps and chunks.
RINGS = (
    RingSpec("step", DTYPE, HEAD_DIM),
    RingSpec("chunk", DTYPE, HEAD_DIM, has_sinks=True),
    JoinSpec(DTYPE),
)
# Of fp8; the first GPU below has no products of it, so it is there as PTX.
FP8 = KernelSpec("fp8", HEAD_DIM, has_mask=True)
BUILT_FOR = ("sm_86", "sm_90")  # one with PTX for later GPUs, one without
SYSROOT = Path("/usr/aarch64-linux-gnu")


@cache
def folder() -> Path:
    """A folder that is removed when the process ends."""
    path = Path(tempfile.mkdtemp(prefix="localattn-plugin-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def compiler(arch: Arch) -> Compiler:
    """A compiler for the processor, or the test is skipped."""
    try:
        return find_compiler(arch)
    except MissingDependency as missing:
        pytest.skip(f"{missing.what} {missing.fix}")


def without_zig(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package ziglang, which compiles without any compiler of the system's, were not installed."""

    def version(name: str) -> str:
        if name == "ziglang":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    known = SimpleNamespace(version=version, PackageNotFoundError=metadata.PackageNotFoundError)
    monkeypatch.setattr(compilers, "metadata", known)


def source_file(name: str) -> Path:
    """The C++ file of this name: a program of the tests, or a stand-in of `tests/gpu/simulators/native`."""
    (file,) = (file for folder in _SOURCES for file in folder.rglob(name))
    return file


def failing_compiler(folder: Path, source: str) -> Path:
    """A compiler that says of itself what one for this processor does, and fails at the first line of `source`."""
    path = folder / "broken"
    path.write_text(
        f"#!/bin/sh\ncase $1 in -dumpmachine) echo {host_arch()}-linux-gnu;; --version) echo broken 1;; "
        f"*) echo '{source}:1: error: this compiler fails' >&2; exit 1;; esac\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def specs() -> list[AnySpec]:
    """Every kernel of one type and head size, but those with both xpos and shared_qk; AFT-local's; `RINGS`; `FP8`."""
    attention = (spec for spec in full_set([DTYPE], [HEAD_DIM]) if not (spec.has_xpos and spec.has_shared_qk))
    return [*attention, *AFT_SPECS, *RINGS, FP8]


def is_rare(spec: AnySpec) -> bool:
    """What few models have is compiled for one GPU here: others run its PTX."""
    ordinary = isinstance(spec, KernelSpec) and spec.dtype == DTYPE
    return not ordinary or any(spec.flags[2:])


@cache
def kernels() -> list[CompiledKernel]:
    """What goes into the libraries of both processors: it is the same, and takes most of the time."""
    return compiled("kernels of both libraries", _kernels)


def compiled(name: str, compile_them: Callable[[], list[CompiledKernel]]) -> list[CompiledKernel]:
    """Kernels by a name of their own, compiled once a run."""
    place = once(name, lambda folder: (folder / "kernels").write_bytes(pickle.dumps(compile_them())))
    kernels: list[CompiledKernel] = pickle.loads((place / "kernels").read_bytes())
    return kernels


def _kernels() -> list[CompiledKernel]:
    common, rare = ([spec for spec in specs() if is_rare(spec) == wanted] for wanted in (False, True))
    every, first = [TARGETS[name] for name in BUILT_FOR], [TARGETS[BUILT_FOR[0]]]
    return compile_tiles([*to_compile(common, every), *to_compile(rare, first)])


@cache
def library(arch: Arch) -> LibrarySidecar:
    """A library of all op types for one element type and head size."""
    pytest.importorskip("triton", reason="triton compiles the kernels")
    compiler(arch)
    targets = [TARGETS[name] for name in BUILT_FOR]

    def make(place: Path) -> None:
        with mock.patch.object(build, "compile_tiles", lambda *_, **__: kernels()):
            build.build_library(place / f"{arch}.so", specs=specs(), targets=targets, arch=arch)

    path = once(f"plugin-{arch}", make) / f"{arch}.so"
    return parse_sidecar(json.loads(sidecar_path(path).read_bytes()), path)


@cache
def small_library() -> Path:
    """A library with the kernels of `engine_models.small_model` in both precisions; its PTX serves every target."""
    specs = [KernelSpec(dtype, 16) for dtype in ("fp32", "fp16")]
    name = TENSORRT_PLUGIN.file_name

    def make(place: Path) -> None:
        build.build_library(place / name, specs=specs, targets=[TARGETS["sm_80"]], arch=host_arch())

    return once("small plugin", make) / name


@cache
def program(arch: Arch, source: str, *flags: str) -> Path:
    """A compiled C++ file; a shared library of the name that `flags` give it, if they do."""
    shared = next((flag.rpartition("=")[2] for flag in flags if "soname" in flag), "")
    name = shared or Path(source).stem
    includes = []
    for headers in (find_tensorrt_headers(arch), find_cuda_headers(arch)):
        includes += ["-isystem", str(headers.folder)]
    command = [*compiler(arch).command, "-std=c++17", "-O1", "-Wall", "-Werror", *includes, *flags]

    def make(place: Path) -> None:
        output = str(place / name)
        subprocess.run([*command, "-o", output, str(source_file(source)), "-ldl", "-pthread"], check=True)

    return once(f"{arch}/{source}{zlib.crc32(repr(flags).encode())}", make) / name


def stand_in_driver(arch: Arch) -> Path:
    """The folder with the stand-in for libcuda.so.1."""
    return program(arch, "fake_cuda.cpp", "-shared", "-fPIC", "-Wl,-soname=libcuda.so.1").parent


def emulator(arch: Arch) -> list[str]:
    """What runs programs of that processor here, or the test is skipped."""
    if arch == host_arch():
        return []
    qemu = shutil.which(f"qemu-{arch}") or shutil.which(f"qemu-{arch}-static")
    if qemu is None or not SYSROOT.is_dir():
        pytest.skip(f"qemu-{arch} (package qemu-user) and libc6-{arch}-cross run its programs")
    return [qemu, "-L", str(SYSROOT)]
