"""Name the processors that libraries are built for, and refuse libraries for another one."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal

from ..error_texts import argument
from ..errors import UsageError

Arch = Literal["x86_64", "aarch64"]
ARCHITECTURES: tuple[Arch, ...] = ("x86_64", "aarch64")

_MACHINE = {62: "x86_64", 183: "aarch64"}  # e_machine of an ELF header (System V ABI, "ELF Header")


def machine() -> str:
    """Return Linux's name for this machine's processor, whether a library can be built for it or not."""
    found = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(found, found)


def host_arch() -> Arch:
    """Return the processor of this machine.

    Raises:
        UsageError: no library can be built for it.
    """
    found = machine()
    for arch in ARCHITECTURES:
        if arch == found:
            return arch
    raise UsageError(
        f"Plugin libraries cannot be built for {found} processors.",
        fix=f"Give {argument('arch', 'x86_64')} or aarch64.",
    )


def refuse_foreign(library: Path, header: bytes) -> None:
    """Refuse a file that is not a library for this processor.

    Args:
        library: its path, for the error.
        header: its bytes, the first 20 at least.

    Raises:
        UsageError: no shared library, or one for another processor.
    """
    if len(header) < 20 or header[:4] != b"\x7fELF":
        raise UsageError(f"{library} is not a shared library.")
    machine = _MACHINE.get(int.from_bytes(header[18:20], "little"), "another")
    if machine != host_arch():
        raise UsageError(
            f"{library} is for {machine} processors.",
            why=f"This machine is {host_arch()}.",
            fix="Check it on the device it was built for.",
        )
