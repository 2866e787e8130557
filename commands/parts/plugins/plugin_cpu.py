"""Run `localattn plugin … --backend onnxruntime`: the library of compiled CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....core.errors import UsageError
from ..console import bytes_text, note, print_json, progress, say, suggest
from .newest import newest

if TYPE_CHECKING:
    from ....core.machine.processor import Arch
    from ....plugins.cpu.sidecar import CpuLibrarySidecar

BACKEND = "onnxruntime"


def refuse_options(given: Mapping[str, object]) -> None:
    """Refuse options that choose GPU kernels: they have no meaning here.

    Raises:
        UsageError: one was given.
    """
    named = [name for name, value in given.items() if value]
    if named:
        raise UsageError(
            f"{' and '.join(named)} cannot be combined with --backend {BACKEND}.",
            why="On the CPU one library has the kernels for every model, head size and element type.",
            fix="Leave them out.",
        )


def build(output: Path | None, arch: Arch, *, force: bool, as_json: bool) -> None:
    """Build the library, unless the one in the cache is already the same."""
    from ....core.storage.library_store import CPU_KERNELS, prepare_cache
    from ....plugins.compilers import find_compiler
    from ....plugins.cpu.build import build_library, up_to_date

    path = output or prepare_cache(arch) / CPU_KERNELS.file_name
    sidecar = up_to_date(path, arch) if output is None and not force else None
    if sidecar is not None:
        note(f"{path} is up to date; --force builds it again.")
    else:
        note(f"Compiler {find_compiler(arch).version}")
        with progress() as step:
            sidecar = build_library(path, arch=arch, overwrite=force or output is None, progress=step)
    if output is not None:
        note(f"{path} is not loaded automatically: name it with --plugin-library {path}, or build without --output.")
    if as_json:
        print_json(document(sidecar))
    else:
        print_library(sidecar)
        suggest("localattn", "plugin", "check", "--backend", BACKEND, *([] if output is None else [output]))


def check(library: Path | None, *, as_json: bool) -> None:
    """Load a library into onnxruntime and run each of its kernels."""
    from ....core.machine.processor import host_arch
    from ....core.storage.library_store import CPU_KERNELS, read_named
    from ....plugins.cpu.check import check_library

    chosen = newest(CPU_KERNELS, host_arch()) if library is None else read_named(CPU_KERNELS, library)
    checked = check_library(chosen)
    if as_json:
        print_json({"path": str(chosen.path), "backend": BACKEND, **asdict(checked)})
    else:
        say(f"{chosen.path} in onnxruntime {checked.onnxruntime}, instruction set {checked.instruction_set}:")
        for op_type, dtypes in checked.kernels.items():
            say(f"  {op_type}  ran in {', '.join(dtypes)}")
        suggest("localattn", "doctor")


def document(sidecar: CpuLibrarySidecar) -> dict[str, Any]:
    """Return the sidecar of a library as JSON types."""
    return {"path": str(sidecar.path), **sidecar.to_dict()}


def print_library(sidecar: CpuLibrarySidecar) -> None:
    """Print what is in a library, for people."""
    from ....core.storage.library_store import CPU_KERNELS

    say(f"{sidecar.path}  {sidecar.arch}, {bytes_text(sidecar.bytes)}, for onnxruntime on the CPU")
    by_dtypes: dict[str, list[str]] = {}
    for op_type, dtypes in sidecar.kernels.items():
        by_dtypes.setdefault(", ".join(dtypes), []).append(op_type)
    for names, op_types in by_dtypes.items():
        say(f"  kernels {', '.join(op_types)}: {names}; every size")
    say(f"  built   {sidecar.created}, {sidecar.compiler}, glibc ≥ {sidecar.glibc}")
    say(f"  sha256  {sidecar.sha256}")
    if sidecar.fingerprint != CPU_KERNELS.fingerprint():
        say("  OLD     built from the sources of another release: not loaded automatically")
