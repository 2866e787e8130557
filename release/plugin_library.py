"""The distribution localattn-plugin-library: TensorRT's plugin library for one processor, with code for every GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from localattn.core.machine.processor import ARCHITECTURES, Arch
from localattn.core.storage.library_store import TENSORRT_PLUGIN
from localattn.core.storage.publishing import sidecar_path
from localattn.plugins.compilers import zig_compiler
from localattn.plugins.kernel.compile import AnySpec, CompiledKernel, compile_tiles
from localattn.plugins.kernel.targets import TARGETS, Target
from localattn.plugins.library.build import build_library
from localattn.plugins.library.embed import to_compile
from localattn.plugins.library.selection import every_kernel
from localattn.plugins.library.sidecar import companion_path

from .compiled_in import parts, parts_for_gpus
from .sbom import with_sbom
from .wheel_file import Files, information, metadata, platform_tag, read, write

NAME, PACKAGE = "localattn-plugin-library", "localattn_plugin_library"
_DESCRIPTION = f"""\
The attention kernels of localattn for TensorRT and TensorRT-RTX, compiled. `localattn build` finds this library once
it is installed; it serves the release of localattn of the same version: `pip install 'localattn[plugin-library]'`.

GPUs: {", ".join(target.devices for target in TARGETS.values())}; later ones by PTX.
"""


def wheels(
    pure: Path,
    folder: Path,
    *,
    specs: Sequence[AnySpec] | None = None,
    targets: Sequence[Target] = tuple(TARGETS.values()),
    archs: tuple[Arch, ...] = ARCHITECTURES,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Write a wheel with the library for each processor, and return them.

    Args:
        pure: wheel of the package, whose version, author and licence they have.
        folder: to write to.
        specs: kernels; by default all.
        targets: GPUs to have machine code for.
        archs: processors.
        progress: told of each kernel.
    """
    specs = every_kernel() if specs is None else specs
    wanted = to_compile(specs, targets)
    total, done = len(wanted), iter(range(1, len(wanted) + 1))
    kernels = compile_tiles(wanted, progress=lambda kernel: progress(f"kernel {next(done)} of {total}: {kernel.entry}"))
    base = _information(read(pure))
    made = []
    for arch in archs:
        files = {**base, **_library(arch, specs, targets, kernels)}
        made.append(write(with_sbom(files, [*parts(), *parts_for_gpus(arch)]), folder, platform_tag(arch)))
    return made


def _library(
    arch: Arch, specs: Sequence[AnySpec], targets: Sequence[Target], kernels: Sequence[CompiledKernel]
) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        path = Path(folder, TENSORRT_PLUGIN.file_name)
        compiler = zig_compiler(arch)
        build_library(path, specs=specs, targets=targets, arch=arch, compiler=compiler, kernels=kernels)
        found = (path, companion_path(path), sidecar_path(path))
        return {f"{PACKAGE}/{arch}/{file.name}": file.read_bytes() for file in found}


def _information(package: Files) -> dict[str, bytes]:
    """Return what is in every such wheel besides the library: metadata, licence, and a package without code."""
    version = metadata(package, "Version")
    info = f"{PACKAGE}-{version}.dist-info"
    fields = {
        "Metadata-Version": "2.4",
        "Name": NAME,
        "Version": version,
        "Summary": "The attention kernels of localattn for TensorRT, compiled.",
        "License-Expression": metadata(package, "License-Expression"),
        "License-File": "LICENSE",
        "Requires-Python": metadata(package, "Requires-Python"),
        "Description-Content-Type": "text/markdown",
    }
    head = "".join(f"{name}: {value}\n" for name, value in fields.items())
    licence = package[f"{information(package)}/licenses/LICENSE"]
    return {
        f"{PACKAGE}/__init__.py": b'"""Libraries of localattn; there is no code here."""\n',
        f"{info}/METADATA": f"{head}\n{_DESCRIPTION}".encode(),
        f"{info}/licenses/LICENSE": licence,
    }
