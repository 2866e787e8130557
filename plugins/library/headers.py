"""Find the C++ headers of the plugin library: TensorRT's, and CUDA's runtime header.

No library of either is needed. TensorRT's headers come with JetPack, with NVIDIA's archive, with Debian packages of
NVIDIA's, and as a copy in the kernel-lens wheel; its Python wheels have none.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import MissingDependency
from .sidecar import Arch

TENSORRT_HEADER, CUDA_HEADER = "NvInferRuntime.h", "cuda_runtime_api.h"
# IPluginV3 came with 10.0; 10.3 is the oldest release whose headers the library was compiled with.
OLDEST_TENSORRT = (10, 3)

# Folders below the system's root.
_SYSTEM_TENSORRT = (
    "usr/include/{arch}-linux-gnu",
    "usr/include",
    "usr/local/include",
    "usr/local/tensorrt/include",
    "usr/local/TensorRT/include",
    "opt/tensorrt/include",
)
_SYSTEM_CUDA = (
    "usr/local/cuda/include",
    "usr/local/cuda/targets/{arch}-linux/include",
    "usr/include",
    "usr/include/{arch}-linux-gnu",
)
# Wheels with a copy: package and the folder in it.
_WHEELS_TENSORRT = (("kernel_lens", "include/tensorrt"),)
_WHEELS_CUDA = (
    ("triton", "backends/nvidia/include"),
    ("nvidia", "cu13/include"),
    ("nvidia", "cuda_runtime/include"),
)


@dataclass(frozen=True)
class HeaderFolder:
    """A folder with the required headers.

    Args:
        folder: for the compiler's include path.
        version: release of TensorRT or CUDA, "10.14.1".
        origin: where it was found: the name of an environment variable, "system", or a wheel.
    """

    folder: Path
    version: str
    origin: str

    def describe(self) -> str:
        """Return folder, version and origin in words, for reports."""
        return f"{self.version} in {self.folder} ({self.origin})"


def find_tensorrt_headers(arch: Arch, root: Path = Path("/")) -> HeaderFolder:
    """Find TensorRT's headers.

    If `TENSORRT_ROOT` is set, only that folder is searched; else the system's folders, then the copy in a wheel.

    Args:
        arch: processor that the library is for.
        root: the system's root folder.

    Raises:
        MissingDependency: there are no headers, or only too old ones.
    """
    given = os.environ.get("TENSORRT_ROOT")
    passed_over = []
    for folder, origin in _places(given, "TENSORRT_ROOT", _SYSTEM_TENSORRT, _WHEELS_TENSORRT, arch, root):
        if not (folder / TENSORRT_HEADER).is_file():
            continue
        version = tensorrt_version(folder)
        if version >= OLDEST_TENSORRT:
            return HeaderFolder(folder, ".".join(map(str, version)), origin)
        passed_over.append(f"{folder} is of {'.'.join(map(str, version)) or 'an unknown release'}")
    if passed_over:
        why = f"{'; '.join(passed_over)}; {'.'.join(map(str, OLDEST_TENSORRT))} is the oldest supported release."
    elif given:
        why = f"TENSORRT_ROOT is {given}, and neither it nor its folder include has {TENSORRT_HEADER}."
    else:
        why = "No system folder has them, and the wheel kernel-lens is not installed."
    raise MissingDependency(
        "TensorRT's C++ headers are missing.",
        why=why,
        fix="Install a copy with: pip install 'localattn[plugin]'. Or unpack NVIDIA's TensorRT archive and set "
        "TENSORRT_ROOT to its folder. JetPack has them in the package libnvinfer-headers-dev.",
    )


def find_cuda_headers(arch: Arch, root: Path = Path("/")) -> HeaderFolder:
    """Find CUDA's runtime header, which TensorRT's headers include.

    If `CUDA_HOME` is set, only that folder is searched; else the system's folders, then the copies in wheels.

    Args:
        arch: processor that the library is for.
        root: the system's root folder.

    Raises:
        MissingDependency: there is no header.
    """
    given = os.environ.get("CUDA_HOME")
    for folder, origin in _places(given, "CUDA_HOME", _SYSTEM_CUDA, _WHEELS_CUDA, arch, root):
        if (folder / CUDA_HEADER).is_file():
            return HeaderFolder(folder, cuda_version(folder), origin)
    why = (
        f"CUDA_HOME is {given}, whose folder include does not have it."
        if given
        else "No CUDA toolkit and no wheel has it."
    )
    raise MissingDependency(
        f"CUDA's header {CUDA_HEADER} is missing.",
        why=why,
        fix="Install a copy with: pip install 'localattn[plugin]'. Or install a CUDA toolkit and set CUDA_HOME.",
    )


def _places(
    given: str | None,
    variable: str,
    system: tuple[str, ...],
    wheels: tuple[tuple[str, str], ...],
    arch: Arch,
    root: Path,
) -> Iterator[tuple[Path, str]]:
    """Yield the folders to search, in order, with their origin."""
    if given:
        for folder in (Path(given, "include"), Path(given), Path(given, "include", f"{arch}-linux-gnu")):
            yield folder, variable
        return
    for pattern in system:
        yield root / pattern.format(arch=arch), "system"
    for package, inside in wheels:
        found = importlib.util.find_spec(package)  # finds the package without importing it
        for location in (found.submodule_search_locations or []) if found else []:
            yield Path(location, inside), f"wheel {package}"


def tensorrt_version(folder: Path) -> tuple[int, ...]:
    """Return the release that `NvInferVersion.h` states, as `(10, 14, 1)`; empty if it states none."""
    text = _text_of(folder / "NvInferVersion.h")
    defined: dict[str, str] = dict(re.findall(r"^#define\s+(\w+)\s+(\w+)", text, re.MULTILINE))
    numbers = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        value = defined.get(f"NV_TENSORRT_{part}", "")
        value = defined.get(value, value)  # since 10.13 the value is the name of another macro
        if not value.isdigit():
            return ()
        numbers.append(int(value))
    return tuple(numbers)


def cuda_version(folder: Path) -> str:
    """Return the CUDA release of a folder's headers, as "13.0"; "unknown" if they do not state it."""
    for name in (CUDA_HEADER, "cuda.h"):
        found = re.search(r"define\s+CUD(?:ART|A)_VERSION\s+(\d+)", _text_of(folder / name))
        if found:
            number = int(found[1])
            return f"{number // 1000}.{number % 1000 // 10}"
    return "unknown"


def _text_of(header: Path) -> str:
    """Read a header; a missing header counts as empty."""
    return header.read_text(errors="replace") if header.is_file() else ""
