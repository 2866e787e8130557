"""What Zig's compiler links into a library besides our sources: names, releases, licences and their texts."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Part:
    """A piece of other software in a library.

    Args:
        name: of the software.
        version: its release.
        licence: as an SPDX expression.
        text: file of the licence, in the package ziglang.
        purl: package URL.
    """

    name: str
    version: str
    licence: str
    text: Path
    purl: str


def parts() -> list[Part]:
    """Return the C++ library and the compiler's own functions, as the installed ziglang has them."""
    found = importlib.util.find_spec("ziglang")
    assert found is not None and found.origin is not None
    folder, zig = Path(found.origin).parent, version("ziglang")
    config = (folder / "lib" / "libcxx" / "include" / "__config").read_text(encoding="utf-8")
    stated = re.search(r"define _LIBCPP_VERSION (\d+)", config)
    assert stated is not None
    number = int(stated[1])  # 220108 is 22.1.8
    llvm = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    apache = "Apache-2.0 WITH LLVM-exception"
    texts = {name: folder / "lib" / name / "LICENSE.TXT" for name in ("libcxx", "libcxxabi", "libunwind")}
    libraries = [
        Part(name, llvm, apache, text, f"pkg:github/llvm/llvm-project@llvmorg-{llvm}") for name, text in texts.items()
    ]
    return [*libraries, Part("zig-compiler-rt", zig, "MIT", folder / "LICENSE", f"pkg:pypi/ziglang@{zig}")]
