"""The package with its compiled kernels for the CPU, one wheel for each processor, both built on either."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from localattn.core.machine.processor import ARCHITECTURES, Arch
from localattn.core.storage.library_store import CPU_KERNELS
from localattn.core.storage.publishing import sidecar_path
from localattn.plugins.compilers import System, zig_compiler
from localattn.plugins.cpu.build import OPTIONS, SOURCES, build_library
from localattn.plugins.shared_library import compile_library

from .compiled_in import parts
from .sbom import with_sbom
from .wheel_file import platform_tag, read, write

# Systems for which the library is compiled and looked at, and on which nobody has run it.
UNTESTED: tuple[tuple[Arch, System, str], ...] = (
    ("aarch64", "macos", "liblocalattn_onnxruntime.dylib"),
    ("x86_64", "windows", "localattn_onnxruntime.dll"),
)


def wheels(pure: Path, folder: Path, archs: tuple[Arch, ...] = ARCHITECTURES) -> list[Path]:
    """Write the pure wheel again for each processor, with the library for it inside, and return the new wheels."""
    return [write(with_sbom({**read(pure), **library(arch)}, parts()), folder, platform_tag(arch)) for arch in archs]


def library(arch: Arch) -> dict[str, bytes]:
    """Return the library for a processor and its sidecar, by their names in the wheel."""
    with TemporaryDirectory() as folder:
        path = Path(folder, CPU_KERNELS.file_name)
        build_library(path, arch=arch, compiler=zig_compiler(arch))
        found = (path, sidecar_path(path))
        return {f"localattn/libraries/{arch}/{file.name}": file.read_bytes() for file in found}


def untested(folder: Path) -> list[Path]:
    """Write the libraries for macOS and Windows, which a program names itself, and return them."""
    made = []
    for arch, system, name in UNTESTED:
        with TemporaryDirectory() as scratch:
            path = Path(scratch, name)
            compiler = zig_compiler(arch, system)
            fix = f"{compiler.version}."
            compile_library(SOURCES, compiler, path, name=name, options=OPTIONS, fix=fix, system=system)
            made.append(folder / f"untested-{system}-{arch}-{name}")
            made[-1].write_bytes(path.read_bytes())
    return made
