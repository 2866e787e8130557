"""Build the plugin library: compile kernels by Triton and embed them into the C++ of `source/`.

The library opens the CUDA driver itself and is found through the two functions it exports, so it links neither CUDA nor
TensorRT, and is built for another processor as easily as for this one.
"""

from __future__ import annotations

import logging
import platform
import shutil
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from ...core.errors import LocalAttnError, UsageError
from ...core.progress import timed_steps
from ...core.storage.file_kinds import COMPANION_LIBRARY, LIBRARY
from ...core.storage.files import sha256
from ...core.storage.library_store import TENSORRT_PLUGIN, candidates, keep
from ...core.storage.outputs import Output, writing
from ...core.storage.publishing import publish_together, sidecar_path
from ...core.versions import package_version
from ..compilers import Compiler, find_compiler
from ..kernel.compile import AnySpec, CompiledKernel, compile_tiles, runs_on
from ..kernel.targets import OLDEST_OF_FP8, Target
from ..shared_library import compile_library, newest_glibc, time_of_build
from .embed import images_of, kernel_records, to_compile, write_sources
from .headers import find_cuda_headers, find_tensorrt_headers
from .sidecar import Arch, CompanionRecord, LibrarySidecar, companion_path, parse_sidecar

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).parent / "source"
_COMPANION = Path(__file__).parent / "companion"


@timed_steps(_log)
def build_library(
    output: Path,
    *,
    specs: Sequence[AnySpec],
    targets: Sequence[Target],
    arch: Arch,
    compiler: Compiler | None = None,
    kernels: Sequence[CompiledKernel] | None = None,
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> LibrarySidecar:
    """Build a library, its companion and its sidecar; they appear whole or not at all.

    The companion registers the library with TensorRT in hosts that only open or preload libraries.

    Args:
        output: path of the library.
        specs: kernels to embed, at least one.
        targets: GPUs to embed machine code for, at least one.
        arch: processor it shall run on.
        compiler: for this processor; the first that is found by default.
        kernels: `specs` compiled as `to_compile` says; by default they are compiled here. They are the same for every
            processor.
        overwrite: an existing file may be replaced.
        jobs: kernels compiled at a time; all processors by default.
        progress: called with each step.

    Raises:
        UsageError: nothing to build, or the output exists or cannot be written.
        MissingDependency: headers, a C++ compiler or Triton are missing.
        BuildFailed: a compiler failed.
    """
    if not specs or not targets:
        raise UsageError("The library would be empty.", why="No kernel or no GPU target was requested.")
    if not any(runs_on(spec, target) for spec in specs for target in targets):
        raise UsageError(
            f"None of these kernels runs on {', '.join(target.name for target in targets)}.",
            why=f"fp8 needs {OLDEST_OF_FP8.name} or later.",
            fix="Choose such a target, or other element types.",
        )
    companion = companion_path(output)
    with writing(Output(companion, COMPANION_LIBRARY), Output(output, LIBRARY), overwrite=overwrite) as folder:
        tensorrt, cuda = find_tensorrt_headers(arch), find_cuda_headers(arch)
        compiler = compiler or find_compiler(arch)
        images = images_of(kernels or _compile_kernels(specs, targets, jobs, progress), targets)
        work = folder / "work"
        shutil.copytree(_SOURCE, work)
        write_sources(images, package_version(), work)
        progress(f"compiling C++ for {arch}")
        staged = folder / output.name
        compile_library(
            work,
            compiler,
            staged,
            name=TENSORRT_PLUGIN.file_name,
            options=("-O2", "-isystem", str(tensorrt.folder), "-isystem", str(cuda.folder), "-ldl"),
            fix=f"TensorRT headers {tensorrt.describe()}, CUDA headers {cuda.describe()}, {compiler.version}.",
        )
        # The companion includes no header of NVIDIA's.
        staged_companion, options, fix = folder / companion.name, ("-O2", "-ldl"), f"{compiler.version}."
        compile_library(_COMPANION, compiler, staged_companion, name=companion.name, options=options, fix=fix)
        sidecar = LibrarySidecar(
            path=output,
            arch=arch,
            targets=[target.name for target in dict.fromkeys(targets)],
            kernels=kernel_records(images),
            sha256=sha256(staged),
            bytes=staged.stat().st_size,
            fingerprint=TENSORRT_PLUGIN.fingerprint(),
            tensorrt_headers=tensorrt.version,
            compiler=compiler.version,
            glibc=newest_glibc(staged),
            companion=CompanionRecord(
                name=companion.name, sha256=sha256(staged_companion), bytes=staged_companion.stat().st_size
            ),
            versions={
                "localattn": package_version(),
                "triton": metadata.version("triton"),
                "python": platform.python_version(),
            },
            created=time_of_build(),
        )
        staged_sidecar = sidecar_path(staged)
        staged_sidecar.write_text(sidecar.to_json(), encoding="utf-8")
        places = {staged_companion: companion, staged_sidecar: sidecar_path(output), staged: output}
        publish_together(places, staged.parent)
    keep(TENSORRT_PLUGIN, output, sidecar.model_dump(mode="json"))
    return sidecar


def up_to_date(library: Path, specs: Sequence[AnySpec], targets: Sequence[Target], arch: Arch) -> LibrarySidecar | None:
    """Return the sidecar of a library in the cache if building it again would give the same library, else None."""
    try:
        stored = next((found for found in candidates(TENSORRT_PLUGIN) if found.path == library), None)
        sidecar = None if stored is None else parse_sidecar(stored.read().sidecar, library)
    except LocalAttnError:  # any error means that it is not up to date
        return None
    if sidecar is None:
        return None
    same = (
        sidecar.arch == arch
        and sidecar.has_companion()
        and sidecar.fingerprint == TENSORRT_PLUGIN.fingerprint()
        and sidecar.targets == [target.name for target in dict.fromkeys(targets)]
        and all(any(kernel.is_of(spec) for spec in specs) for kernel in sidecar.kernels)
        and not any(sidecar.missing([spec], [each for each in targets if runs_on(spec, each)]) for spec in specs)
    )
    return sidecar if same else None


def _compile_kernels(
    specs: Sequence[AnySpec], targets: Sequence[Target], jobs: int | None, progress: Callable[[str], None]
) -> list[CompiledKernel]:
    """Compile the code that a library for these targets needs of these kernels; report each kernel."""
    wanted = to_compile(specs, targets)
    total, done = len(wanted), 0

    def count(kernel: CompiledKernel) -> None:
        nonlocal done
        done += 1
        progress(f"kernel {done} of {total}: {kernel.spec.name} for {kernel.target.name}")

    progress(f"compiling {total} kernels")
    return compile_tiles(wanted, jobs, count)
