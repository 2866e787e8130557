"""Compile C++ sources into a shared library that also runs on other systems."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from ..core.errors import BuildFailed
from .compilers import Compiler, System

_log = logging.getLogger(__name__)

# One call compiles and links. The C++ library is linked in, so that the system's may be older than the compiler's. Only
# what the sources export is visible; on Linux a version script, `exports.map`, hides the C++ library's symbols too.
_FLAGS = (
    *("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections"),
    *("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-deprecated-declarations", "-s"),
)
_LINKING: dict[System, tuple[str, ...]] = {
    "linux": (
        *("-Wl,-soname={name}", "-Wl,--version-script=exports.map", "-Wl,--no-undefined"),
        *("-Wl,--gc-sections", "-Wl,-z,relro,-z,now"),
    ),
    "macos": ("-Wl,-install_name,@rpath/{name}", "-Wl,-dead_strip"),
    "windows": ("-Wl,--gc-sections",),
}


def compile_library(
    sources: Path,
    compiler: Compiler,
    output: Path,
    *,
    name: str,
    options: Sequence[str],
    fix: str,
    system: System = "linux",
) -> None:
    """Compile every source of a folder and the folders in it into one library.

    Args:
        sources: the folder, with an `exports.map`; its sources include each other by paths from here.
        compiler: for the processor asked for.
        output: the library to write.
        name: the name it carries ("liblocalattn_plugin.so").
        options: more of the compiler's options, libraries included.
        fix: what to say if the compiler fails.
        system: it shall run on.

    Raises:
        BuildFailed: the compiler did not make it.
    """
    every = sorted(sources.rglob("*"))
    files = [path.relative_to(sources).as_posix() for path in every if path.suffix in (".cpp", ".S")]
    linking = (option.format(name=name) for option in _LINKING[system])
    command = [*compiler.command, *_FLAGS, *compiler.runtime, *linking, "-I.", *files, "-o", str(output), *options]
    _log.info("%s", " ".join(command))
    finished = subprocess.run(command, cwd=sources, capture_output=True, text=True, errors="replace")
    if finished.returncode:
        lines = finished.stderr.splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "")
        raise BuildFailed(f"{compiler.command[0]} could not compile the plugin library.", why=first, fix=fix)
    if not output.is_file():
        why = f"It ended without an error but did not write {name}."
        raise BuildFailed(f"{compiler.command[0]} produced no library.", why=why, fix=fix)


def newest_glibc(library: Path) -> str:
    """Return the newest GLIBC_x.y that the library needs, such as "2.34"."""
    found = {
        tuple(map(int, match.split(b"."))) for match in re.findall(rb"\0GLIBC_([\d.]+)(?=\0)", library.read_bytes())
    }
    return ".".join(map(str, max(found))) if found else ""


def time_of_build() -> str:
    """Return the time now, ISO 8601; the one in `SOURCE_DATE_EPOCH` if it is set, so that builds can be repeated."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    moment = datetime.fromtimestamp(int(given), timezone.utc) if given.isdecimal() else datetime.now(timezone.utc)
    return moment.isoformat(timespec="seconds")
