"""The compiled kernel of the attention node: built once for a run of the benchmarks, known to its child processes."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

# Where a process tells its children what it built.
_VARIABLE = "LOCALATTN_BENCHMARKS_LIBRARY"


class NoKernel(Exception):
    """There is no compiled kernel here; the message says why."""


def library() -> Path:
    """The library that onnxruntime loads.

    Raises:
        NoKernel: this machine cannot build it.
    """
    if _VARIABLE not in os.environ:
        found = _build()
        if isinstance(found, str):
            raise NoKernel(found)
        os.environ[_VARIABLE] = str(found)
    return Path(os.environ[_VARIABLE])


def why_no_library() -> str | None:
    """The reason why there is none, or None; builds it."""
    try:
        library()
    except NoKernel as reason:
        return str(reason)
    return None


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Gone with this process."""
    return tempfile.TemporaryDirectory(prefix="localattn-benchmarks-")


@cache
def _build() -> Path | str:
    """The library, or the reason why there is none."""
    from localattn.core.errors import LocalAttnError
    from localattn.core.machine.processor import host_arch
    from localattn.core.storage.library_store import CPU_KERNELS
    from localattn.plugins.cpu.build import build_library

    path = Path(_folder().name) / CPU_KERNELS.file_name
    try:
        build_library(path, arch=host_arch())
    except LocalAttnError as error:
        return " ".join(filter(None, (error.what, error.why)))
    return path
