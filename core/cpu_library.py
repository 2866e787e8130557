"""The library of compiled kernels for onnxruntime on the CPU: the facts beside it, and finding the one to use.

`plugins/cpu` builds it; sessions open it. Both meet here, without anything heavy: the facts are read by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from . import built
from .errors import UsageError
from .fused_node import FUSED_DOMAIN, FUSED_NODES
from .node import DOMAIN, VARIANTS
from .processor import host_arch
from .publishing import MAX_BYTES, sidecar_path
from .reading import read_plain

LIBRARY_NAME = "liblocalattn_onnxruntime.so"
# The attention nodes it has kernels for, with fp32 or fp16 inputs; those with xpos stay with their function body.
ATTENTION = tuple(variant.op_type for variant in VARIANTS if not variant.has_xpos)
ATTENTION_DTYPES = ("fp32", "fp16")
# All of its kernels: the element types by domain and op type.
KERNELS = {(DOMAIN, op_type): ATTENTION_DTYPES for op_type in ATTENTION} | {
    (FUSED_DOMAIN, node.op_type): node.dtypes for node in FUSED_NODES
}
# The oldest onnxruntime whose interface it uses; `source/onnxruntime_c.h` says why.
OLDEST_ONNXRUNTIME = "1.17"

HOW_TO_BUILD = "localattn plugin build --backend onnxruntime"
_FORMAT = "localattn-onnxruntime"
_KIND = "onnxruntime-libraries"
SOURCES = Path(__file__).resolve().parents[1] / "plugins" / "cpu" / "source"


@dataclass(frozen=True)
class CpuLibraryFacts:
    """What the JSON file beside a library says.

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
        path: where the library lies; not in the file.
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
    format: str = _FORMAT
    format_version: int = 2
    path: Path = Path()

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, without the path."""
        return {name: value for name, value in asdict(self).items() if name != "path"}

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def is_cpu_library(library: Path) -> bool:
    """Whether the facts beside a library say that it is one of these."""
    try:
        document = json.loads(read_plain(sidecar_path(library), MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == _FORMAT


def read_facts(library: Path, *, verify: bool = True) -> CpuLibraryFacts:
    """The facts beside a library.

    Raises:
        UsageError: there is no library, or no facts beside it, or they are broken.
        CheckFailed: `verify` is set and the library is not the one the facts were written for.
    """
    facts = replace(_parse(built.facts_beside(library, HOW_TO_BUILD)), path=library)
    if verify:
        built.check_digest(library, facts.sha256, HOW_TO_BUILD)
    return facts


def _parse(path: Path) -> CpuLibraryFacts:
    broken = UsageError(f"{path} does not describe a library of kernels for onnxruntime.")
    try:
        document = json.loads(read_plain(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise broken from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise broken
    try:
        facts = CpuLibraryFacts(**{f.name: document[f.name] for f in fields(CpuLibraryFacts) if f.name != "path"})
    except KeyError as error:
        raise broken from error
    texts = (facts.arch, facts.sha256, facts.fingerprint, facts.compiler, facts.glibc, facts.created)
    kernels = facts.kernels.values() if isinstance(facts.kernels, dict) else [None]
    if not (all(isinstance(x, str) for x in texts) and all(isinstance(x, list) for x in kernels)):
        raise broken
    return facts


def remember(library: Path) -> None:
    """Note that a library was built now."""
    built.remember(_KIND, library)


def default_path(arch: str) -> Path:
    """Where a library goes when no path is given."""
    return built.cache_folder() / arch / LIBRARY_NAME


def built_libraries() -> list[CpuLibraryFacts]:
    """Facts of every such library that was built on this machine and is still there, the newest first."""
    return list(_readable())


def _readable() -> Iterator[CpuLibraryFacts]:
    return built.readable(_KIND, lambda path: read_facts(path, verify=False))


def find_library(arch: str | None = None, *, this_release: bool = True) -> CpuLibraryFacts | None:
    """The library that was built last for a processor; None if there is none.

    Args:
        arch: the processor, by default this machine's.
        this_release: only one made from the sources of this release.

    Raises:
        CheckFailed: it was changed after it was built.
        UsageError: no library can be built for this machine.
    """
    wanted = arch or host_arch()
    for facts in _readable():
        if facts.arch == wanted and (not this_release or facts.fingerprint == fingerprint()):
            built.check_digest(facts.path, facts.sha256, HOW_TO_BUILD)
            return facts
    return None


@cache
def fingerprint() -> str:
    """Digest of everything a library is made from."""
    here = SOURCES.parent
    return built.fingerprint_of((*sorted(SOURCES.iterdir()), here / "build.py", here.parent / "shared_library.py"))


def computes(domain: str, op_type: str) -> bool:
    """Whether a node is one that the library computes."""
    return (domain, op_type) in KERNELS
