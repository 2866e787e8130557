"""The library of compiled CPU kernels, built once a run for either processor, and what of it a model runs."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from localattn.core.machine.processor import Arch, host_arch
from localattn.core.storage.library_store import CPU_KERNELS, keep, prepare_cache
from localattn.core.storage.publishing import sidecar_path
from localattn.plugins.cpu import build
from localattn.plugins.cpu.sidecar import CpuLibrarySidecar, parse_sidecar

from ..run_folder import once
from .plugin_build import compiler


@cache
def built(arch: Arch) -> CpuLibrarySidecar:
    """The library for a processor; the test is skipped where no compiler makes it."""
    compiler(arch)
    name = CPU_KERNELS.file_name
    path = once(f"cpu-{arch}", lambda place: build.build_library(place / name, arch=arch)) / name
    return parse_sidecar(json.loads(sidecar_path(path).read_bytes()), path)


def library() -> str:
    """Path of the library for this machine."""
    return str(built(host_arch()).path)


def put_into_cache() -> Path:
    """A copy of this machine's library in the cache that the environment names, as if it had been built there."""
    path = prepare_cache(host_arch()) / CPU_KERNELS.file_name
    for suffix in ("", ".json"):
        shutil.copy(library() + suffix, str(path) + suffix)
    assert keep(CPU_KERNELS, path, built(host_arch()).to_dict())
    return path


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
