"""What is in a library besides our sources: what Zig's compiler links in, and what kernels for GPUs are made with."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import files, version
from pathlib import Path

from localattn.core.machine.processor import Arch
from localattn.core.storage.library_store import TENSORRT_PLUGIN
from localattn.plugins.library.headers import CUDA_HEADER, TENSORRT_HEADER, find_cuda_headers, find_tensorrt_headers

_CUDA = "LicenseRef-NVIDIA-CUDA-Toolkit"
_EULA = """\
Machine code of functions of NVIDIA's libdevice is part of the compiled kernels. NVIDIA's End User License Agreement
for the CUDA Toolkit, https://docs.nvidia.com/cuda/eula/, lists libdevice.10.bc among the files that may be
distributed with an application (Attachment A).
"""


@dataclass(frozen=True)
class Part:
    """A piece of other software in a library.

    Args:
        name: of the software.
        version: its release.
        licence: as an SPDX expression.
        text: of the licence.
        purl: package URL of the software, or of the package that it came in.
        inside: file name of the one library that has it; empty for all of a wheel.
    """

    name: str
    version: str
    licence: str
    text: bytes
    purl: str
    inside: str = ""


def parts() -> list[Part]:
    """Return the C++ library and the compiler's own functions, as the installed ziglang has them."""
    folder, zig = _package("ziglang"), version("ziglang")
    config = (folder / "lib" / "libcxx" / "include" / "__config").read_text(encoding="utf-8")
    stated = re.search(r"define _LIBCPP_VERSION (\d+)", config)
    assert stated is not None
    number = int(stated[1])  # 220108 is 22.1.8
    llvm = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    apache = "Apache-2.0 WITH LLVM-exception"
    texts = {name: folder / "lib" / name / "LICENSE.TXT" for name in ("libcxx", "libcxxabi", "libunwind")}
    libraries = [
        Part(name, llvm, apache, text.read_bytes(), f"pkg:github/llvm/llvm-project@llvmorg-{llvm}")
        for name, text in texts.items()
    ]
    own = (folder / "LICENSE").read_bytes()
    return [*libraries, Part("zig-compiler-rt", zig, "MIT", own, f"pkg:pypi/ziglang@{zig}")]


def parts_for_gpus(arch: Arch) -> list[Part]:
    """Return what TensorRT's plugin library has besides: Triton's and NVIDIA's code in the kernels, and headers.

    Args:
        arch: processor that the library was compiled for.
    """
    triton = version("triton")
    package, inside = f"pkg:pypi/triton@{triton}", TENSORRT_PLUGIN.file_name
    (licence,) = (path for path in files("triton") or [] if path.match("*.dist-info/licenses/LICENSE"))
    (device,) = (_package("triton") / "backends" / "nvidia" / "lib").glob("libdevice.*.bc")
    tensorrt, cuda = find_tensorrt_headers(arch), find_cuda_headers(arch)
    return [
        Part("triton", triton, "MIT", licence.read_binary(), package, inside),
        Part("libdevice", device.name.split(".")[1], _CUDA, _EULA.encode(), package, inside),
        Part(
            name="tensorrt-headers",
            version=tensorrt.version,
            licence="Apache-2.0",
            text=_notice(tensorrt.folder / TENSORRT_HEADER),
            purl=f"pkg:github/NVIDIA/TensorRT@{tensorrt.version}",
            inside=inside,
        ),
        Part(
            name="cuda-headers",
            version=cuda.version,
            licence=_CUDA,
            text=_notice(cuda.folder / CUDA_HEADER),
            purl=f"pkg:generic/nvidia/cuda-runtime-headers@{cuda.version}",
            inside=inside,
        ),
    ]


def _notice(header: Path) -> bytes:
    """Return the comment that a header begins with: its copyright and licence."""
    found = re.match(rb"\s*/\*.*?\*/", header.read_bytes(), re.DOTALL)
    assert found is not None, f"{header} begins without a notice"
    return found[0] + b"\n"


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    return Path(found.origin).parent
