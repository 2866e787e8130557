"""A CUDA that onnxruntime's GPU providers load on a machine without one: their sessions open, and compute nothing.

What the providers decide while a session opens is theirs and real: which nodes they take, what is copied between them
and the CPU, whether a CUDA graph may be recorded, what goes to TensorRT. Buffers lie in this machine's memory
(`native/memory_as_gpu.cpp`); every other function they import answers 0.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from localattn.plugins.library.sidecar import host_arch

from ...support.native.plugin_build import compiler, folder, source_file
from .tensorrt_releases.releases import unpacked

PROVIDERS = ("libonnxruntime_providers_cuda.so", "libonnxruntime_providers_tensorrt.so")
OTHER = "LOCALATTN_TEST_ONNXRUNTIME_GPU"
# What of CUDA a provider needs; TensorRT and its parser are others' business.
_CUDA = re.compile(r"lib(cu\w+|nvrtc)\.so\.\d+")
_DRIVER = "libcuda.so.1"

# Kept, because a library that nobody holds may be unloaded.
_held: list[ctypes.CDLL] = []


def release_of_gpu() -> str:
    """The release of onnxruntime-gpu: what `OTHER` says, or that which is installed for the CPU."""
    try:
        return os.environ.get(OTHER) or version("onnxruntime")
    except PackageNotFoundError:
        pytest.skip("onnxruntime is not installed")


def onnxruntime_gpu(store: Path) -> Path:
    """The folder of onnxruntime-gpu, fetched once."""
    return unpacked(f"onnxruntime-gpu=={release_of_gpu()}", store)


@cache
def stand_ins(onnxruntime: Path) -> tuple[Path, ...]:
    """The libraries of CUDA that the providers of this onnxruntime need, made for their own lists of functions."""
    capi = onnxruntime / "onnxruntime" / "capi"
    functions: dict[str, set[str]] = defaultdict(set)
    for provider in PROVIDERS:
        for name in re.findall(r"\(NEEDED\).*\[(.*)\]", _said("readelf", "-d", capi / provider)):
            if _CUDA.fullmatch(name):
                functions[name] |= set()
        # "U cudaMalloc@libcudart.so.13"; what has no version is the driver's.
        for symbol, library in re.findall(r" U (\w+)(?:@(\S+))?", _said("nm", "-D", capi / provider)):
            if library in functions:
                functions[library].add(symbol)
            elif not library and re.match(r"cu[A-Z]", symbol):
                functions[_DRIVER].add(symbol)
        # cuDNN is opened when it is first needed, and its functions are asked for by name.
        functions["libcudnn.so.9"] |= set(re.findall(r"cudnn[A-Z]\w+", _said("strings", "-a", capi / provider)))
    return tuple(_library(name, symbols) for name, symbols in functions.items())


def hold(libraries: Iterable[str | Path]) -> None:
    """Load libraries, so that what needs them finds them by name."""
    _held.extend(ctypes.CDLL(str(library)) for library in libraries)


def _said(*command: object) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def _library(name: str, symbols: set[str]) -> Path:
    """One library with these functions, all of the version that bears its name."""
    place = folder() / "cuda"
    place.mkdir(exist_ok=True)
    real = source_file("memory_as_gpu.cpp") if name.startswith("libcudart") else None
    written = set(re.findall(r"(\w+)\([^)]*\) \{", real.read_text())) if real else set()
    source, versions = place / f"{name}.cpp", place / f"{name}.map"
    source.write_text("".join(_function(symbol) for symbol in sorted(symbols - written)))
    versions.write_text(f"{name} {{ global: *; }};\n")
    command = [*compiler(host_arch()).command, "-w", "-O1", "-fno-builtin", "-shared", "-fPIC"]
    sources = [str(path) for path in (source, real) if path]
    linked = [f"-Wl,-soname={name}", f"-Wl,--version-script={versions}", "-o", str(place / name)]
    subprocess.run([*command, *sources, *linked], check=True, stdin=subprocess.DEVNULL)
    return place / name


def _function(symbol: str) -> str:
    """One that answers 0, and gives a handle if it is to create one."""
    if re.fullmatch(r"cu(dnn|blas)(Lt)?Create(_v2)?", symbol):
        return f'extern "C" int {symbol}(void** handle) {{ static int one; *handle = &one; return 0; }}\n'
    return f'extern "C" int {symbol}() {{ return 0; }}\n'
