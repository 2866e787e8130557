"""Build the library of compiled kernels for onnxruntime: one C++ compiler call, without onnxruntime's headers."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from pathlib import Path

from ...core.errors import LocalAttnError
from ...core.machine.processor import Arch, host_arch
from ...core.progress import timed_steps
from ...core.storage.file_kinds import LIBRARY
from ...core.storage.files import sha256
from ...core.storage.library_store import CPU_KERNELS, candidates, keep, prepare_cache
from ...core.storage.outputs import Output, writing
from ...core.storage.publishing import publish_together, sidecar_path
from ...core.versions import package_version
from ..compilers import Compiler, find_compiler
from ..shared_library import compile_library, newest_glibc, time_of_build
from .sidecar import CpuLibrarySidecar, parse_sidecar

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "source"
# The library contains code for several instruction sets and chooses at run time, so no option names a processor.
OPTIONS = ("-O3",)


@timed_steps(_log)
def build_library(
    output: Path,
    *,
    arch: Arch,
    compiler: Compiler | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> CpuLibrarySidecar:
    """Build a library and its sidecar; both appear whole or not at all.

    Args:
        output: path of the library.
        arch: processor it shall run on.
        compiler: for this processor; the first that is found by default.
        overwrite: an existing file may be replaced.
        progress: called with each step.

    Raises:
        UsageError: the output exists or cannot be written.
        MissingDependency: there is no C++ compiler for this processor.
        BuildFailed: the compiler failed.
    """
    with writing(Output(output, LIBRARY), overwrite=overwrite) as folder:
        compiler = compiler or find_compiler(arch)
        staged = folder / output.name
        progress(f"compiling C++ for {arch}")
        compile_library(
            SOURCES, compiler, staged, name=CPU_KERNELS.file_name, options=OPTIONS, fix=f"{compiler.version}."
        )
        sidecar = CpuLibrarySidecar(
            arch=arch,
            sha256=sha256(staged),
            bytes=staged.stat().st_size,
            fingerprint=CPU_KERNELS.fingerprint(),
            compiler=compiler.version,
            glibc=newest_glibc(staged),
            created=time_of_build(),
            versions={"localattn": package_version(), "python": platform.python_version()},
            path=output,
        )
        staged_sidecar = sidecar_path(staged)
        staged_sidecar.write_text(sidecar.to_json(), encoding="utf-8")
        publish_together({staged_sidecar: sidecar_path(output), staged: output}, staged.parent)
    keep(CPU_KERNELS, output, sidecar.to_dict())
    return sidecar


def build_into_cache() -> CpuLibrarySidecar:
    """Build the library for this machine into the cache, unless it exists there.

    Raises:
        UsageError: no library can be built for this machine, or it cannot be kept.
        MissingDependency: there is no C++ compiler.
        BuildFailed: the compiler failed.
    """
    arch = host_arch()
    path = prepare_cache(arch) / CPU_KERNELS.file_name
    return up_to_date(path, arch) or build_library(path, arch=arch, overwrite=True)


def up_to_date(library: Path, arch: Arch) -> CpuLibrarySidecar | None:
    """Return the sidecar of a library in the cache if building it again would give the same library, else None."""
    try:
        stored = next((found for found in candidates(CPU_KERNELS) if found.path == library), None)
        sidecar = None if stored is None else parse_sidecar(stored.read().sidecar, library)
    except LocalAttnError:  # any error means that it is not up to date
        return None
    return sidecar if sidecar and sidecar.arch == arch and sidecar.fingerprint == CPU_KERNELS.fingerprint() else None
