"""Define the sidecar of a plugin library (contents and sources), and find a fitting library.

Importing this module imports pydantic: light modules import it inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from ...core.documents.engine_sidecar import KernelName
from ...core.documents.schema import Record
from ...core.documents.sidecar import first_problem
from ...core.errors import UsageError
from ...core.machine.processor import ARCHITECTURES as ARCHITECTURES
from ...core.machine.processor import Arch as Arch
from ...core.machine.processor import host_arch as host_arch
from ...core.storage.files import is_file, sha256
from ...core.storage.library_store import TENSORRT_PLUGIN, Library, find
from ..kernel.compile import AnySpec
from ..kernel.targets import Target


class KernelRecord(KernelName):
    """One kernel: what it computes, and the GPUs it has code for.

    `op_types` are the nodes it serves, and `op_type` is the first of them. `machine_code` and `ptx` are target names
    ("sm_87"); PTX also runs on every later GPU. `causal` is of AFT-local's: attention tells it at run time.
    """

    op_type: str
    op_types: list[str] = Field(default_factory=list)
    fp32_products: str = "ieee"
    machine_code: list[str]
    ptx: list[str]

    def is_of(self, spec: AnySpec, *, any_products: bool = False) -> bool:
        """Return whether this describes a kernel; with `any_products`, ignore how it multiplies fp32."""
        wanted = {"node": spec.node, **asdict(spec)}
        if any_products:
            wanted.pop("fp32_products", None)
        return all(getattr(self, name) == value for name, value in wanted.items())

    def runs_on(self, capability: int) -> bool:
        """Return whether a GPU of this compute capability (87 for 8.7) can run its machine code or its PTX."""
        return f"sm_{capability}" in self.machine_code or any(int(name[3:]) <= capability for name in self.ptx)


class CompanionRecord(Record):
    """The companion library, which registers a plugin library in hosts that only open or preload libraries."""

    name: str
    sha256: str
    bytes: int


class LibrarySidecar(Record):
    """The sidecar of a plugin library.

    Args:
        path: the library's path; not in the file.
        format: always "localattn-plugin".
        format_version: 1.
        arch: processor it runs on.
        targets: GPUs asked for.
        kernels: what is in it.
        sha256: of the library.
        bytes: its size.
        fingerprint: digest of the sources it was made from, C++ and kernel.
        tensorrt_headers: release of the TensorRT headers it was compiled with.
        compiler: first line of the compiler's `--version`.
        glibc: newest symbol version of the C library it needs.
        companion: the library that registers it; None if none was built.
        versions: release of each package that took part.
        created: time of the build, ISO 8601.
    """

    path: Path | None = Field(default=None, exclude=True)
    format: Literal["localattn-plugin"] = "localattn-plugin"
    format_version: Literal[1] = 1
    arch: Arch
    targets: list[str]
    kernels: list[KernelRecord]
    sha256: str
    bytes: int
    fingerprint: str
    tensorrt_headers: str
    compiler: str
    glibc: str
    companion: CompanionRecord | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    created: str

    def has_companion(self) -> bool:
        """Return whether the companion that was built with it is in the same folder."""
        if self.path is None or self.companion is None:
            return False
        path = companion_path(self.path)
        return is_file(path) and sha256(path) == self.companion.sha256

    def missing(self, specs: Sequence[AnySpec], targets: Sequence[Target], *, any_products: bool = False) -> list[str]:
        """List in words what the library lacks to run these kernels on these GPUs; empty if it lacks nothing.

        `any_products`: kernels that multiply fp32 in another way count too.
        """
        lacking = []
        for spec in specs:
            kernel = next((kernel for kernel in self.kernels if kernel.is_of(spec, any_products=any_products)), None)
            if kernel is None:
                lacking.append(spec.name)
            else:
                lacking += [f"{spec.name} on {t.name}" for t in targets if not kernel.runs_on(t.capability)]
        return lacking


def companion_path(library: Path) -> Path:
    """Return the path of the library that registers a plugin library: `libNAME_register.so` next to `libNAME.so`."""
    return library.with_name(f"{library.stem}_register{library.suffix}")


def parse_sidecar(document: Mapping[str, Any], library: Path) -> LibrarySidecar:
    """Parse the sidecar of a library, from its file or from the index of the cache.

    Raises:
        UsageError: they are not of such a library.
    """
    try:
        sidecar = LibrarySidecar.model_validate(document)
    except ValidationError as error:
        what = f"The sidecar of {library} does not describe a {TENSORRT_PLUGIN.title}."
        raise UsageError(what, why=first_problem(error)) from error
    sidecar.path = library
    return sidecar


def find_library(arch: Arch, specs: Sequence[AnySpec] | None = None, targets: Sequence[Target] = ()) -> Library | None:
    """Find the newest library for a processor that may be loaded automatically; None if there is none.

    With `specs`, the library must contain these kernels for these GPUs, built from this release's sources.

    Raises:
        CheckFailed: others can write it, or it was changed after it was built.
    """

    def serves(document: Mapping[str, Any]) -> bool:
        try:
            sidecar = parse_sidecar(document, Path(TENSORRT_PLUGIN.file_name))
        except UsageError:
            return False
        return not sidecar.missing(specs or (), targets)

    return find(TENSORRT_PLUGIN, arch=arch, this_release=specs is not None, wanted=serves)
