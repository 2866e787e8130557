"""Define the sidecar of a library of kernels for onnxruntime.

It is read and written without pydantic: `setup.py` builds the library where no dependency of the package is installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...core.storage.cpu_library import KERNELS
from ...core.storage.library_store import CPU_KERNELS


@dataclass(frozen=True)
class CpuLibrarySidecar:
    """The sidecar of a library.

    Args:
        arch: processor it runs on, "x86_64" or "aarch64".
        sha256: of the library.
        bytes: its size.
        fingerprint: digest of the sources it was made from.
        compiler: first line of the compiler's `--version`.
        glibc: newest symbol version of the C library it needs.
        created: time of the build, ISO 8601.
        versions: releases that took part.
        kernels: element types by op type.
        format: always "localattn-onnxruntime".
        format_version: 2.
        path: the library's path; not in the file.
    """

    arch: str
    sha256: str
    bytes: int
    fingerprint: str
    compiler: str
    glibc: str
    created: str
    versions: dict[str, str]
    kernels: dict[str, list[str]] = field(
        default_factory=lambda: {op_type: list(dtypes) for (_, op_type), dtypes in KERNELS.items()}
    )
    format: str = CPU_KERNELS.format
    format_version: int = 2
    path: Path = Path()

    def to_dict(self) -> dict[str, Any]:
        """Return the sidecar as JSON types, without the path."""
        return {name: value for name, value in asdict(self).items() if name != "path"}

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def parse_sidecar(document: Mapping[str, Any], library: Path) -> CpuLibrarySidecar:
    """Parse the sidecar of a library, from its file or from the index of the cache.

    Raises:
        UsageError: they are not of such a library.
    """
    broken = UsageError(f"The sidecar of {library} does not describe a {CPU_KERNELS.title}.")
    try:
        sidecar = CpuLibrarySidecar(**{f.name: document[f.name] for f in fields(CpuLibrarySidecar) if f.name != "path"})
    except KeyError as error:
        raise broken from error
    texts = (sidecar.arch, sidecar.sha256, sidecar.fingerprint, sidecar.compiler, sidecar.glibc, sidecar.created)
    kernels = sidecar.kernels.values() if isinstance(sidecar.kernels, dict) else [None]
    if not (all(isinstance(x, str) for x in texts) and all(isinstance(x, list) for x in kernels)):
        raise broken
    return replace(sidecar, path=library)
