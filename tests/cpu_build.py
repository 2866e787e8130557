"""The library of compiled CPU kernels, built once a process for either processor."""

from __future__ import annotations

import os
from functools import cache
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
