"""The library of compiled CPU kernels, built once a process for either processor, and what of it a model runs."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from localattn.core.cpu_library import LIBRARY_NAME, CpuLibraryFacts
from localattn.core.processor import Arch, host_arch
from localattn.plugins.cpu import build

from .plugin_build import compiler, folder


@cache
def built(arch: Arch) -> CpuLibraryFacts:
    """The library for a processor; the test is skipped where no compiler makes it."""
    compiler(arch)
    output = folder() / f"cpu-{arch}" / LIBRARY_NAME
    output.parent.mkdir()
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder() / "cpu-cache")}):
        return build.build_library(output, arch=arch)


def library() -> str:
    """Path of the library for this machine."""
    return str(built(host_arch()).path)


def operators_run(model: bytes, folder: Path, feed: dict[str, Any]) -> list[str]:
    """The operators of a run with the library, by onnxruntime's profile."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.register_custom_ops_library(library())
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    session.run(None, feed)
    events = json.loads(Path(session.end_profiling()).read_text())
    return [e["args"]["op_name"] for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
