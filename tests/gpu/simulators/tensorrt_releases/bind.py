"""Making `import tensorrt` work in this process: real bindings, the libraries of TensorRT-RTX under other names."""

from __future__ import annotations

import ctypes
import importlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localattn.runtime.backends.tensorrt_rtx.preload import alias_library

from .slots import put_in_place

BUILDER, PARSER = "libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1"

# As NVIDIA's package `tensorrt` does, which only passes on what the bindings have.
_MODULES = {
    "tensorrt/__init__.py": "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n",
    "tensorrt/plugin/__init__.py": "from tensorrt_bindings.plugin import *\n",
}

# Kept, because a library that nobody holds may be unloaded.
_held: list[ctypes.CDLL] = []


@dataclass(frozen=True)
class Parts:
    """What a process needs; paths as text, for they travel as JSON.

    Args:
        version: of the bindings.
        bindings: the folder with `tensorrt_bindings` in it.
        libraries: the folder with TensorRT-RTX's libraries.
        plugins: a library that has TensorRT's `initLibNvInferPlugins`, which TensorRT-RTX lacks, under TensorRT's name.
        scratch: an empty folder.
    """

    version: str
    bindings: str
    libraries: str
    plugins: str
    scratch: str


def bind(parts: Parts) -> Any:
    """Module `tensorrt` of this release; the loader finds its libraries by the names of those that are loaded."""
    scratch, release = Path(parts.scratch), parts.version.split(".")[0]
    for shipped in (BUILDER, PARSER):
        _held.append(ctypes.CDLL(str(Path(parts.libraries) / shipped)))
    names = {f"libnvinfer.so.{release}": BUILDER, f"libnvonnxparser.so.{release}": PARSER}
    # The last is what TensorRT-RTX itself looks for, see `runtime/backends/tensorrt_rtx/preload.py`.
    for name, shipped in {**names, "libtensorrt_rtx.so": BUILDER}.items():
        (scratch / name).write_bytes(alias_library(name, shipped, platform.machine()))
        _held.append(ctypes.CDLL(str(scratch / name)))
    _held.append(ctypes.CDLL(parts.plugins))
    for name, text in _MODULES.items():
        path = scratch / "modules" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path[:0] = [str(scratch / "modules"), parts.bindings]
    sys.modules["tensorrt_libs"] = None  # type: ignore[assignment]  # NVIDIA's own libraries, which the bindings would load
    trt = importlib.import_module("tensorrt")
    assert trt.__version__ == parts.version, (trt.__version__, parts.version)
    put_in_place(trt, release)
    return trt
