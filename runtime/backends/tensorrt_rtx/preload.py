"""Make TensorRT-RTX's library available under the name that plugin nodes look for.

The wheel ships `libtensorrt_rtx.so.1`, but TensorRT-RTX looks for `libtensorrt_rtx.so` when a plugin node is imported;
it finds nothing and the process aborts (seen with 1.7.1). `preload` loads a shared library of that name without code,
which depends on the real one. The loader then finds it by its name, and every symbol through it. A symbolic link in a
folder would not work: the loader compares names of loaded libraries, and searches the folders that LD_LIBRARY_PATH had
when the process started.

The shared library has a few hundred bytes and is written here, so no compiler is needed. The format is that of the
System V ABI, chapters 4 and 5 (https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

from ....core.at_work import temporary_folder
from ....core.errors import MissingDependency

SHIPPED = "libtensorrt_rtx.so.1"
LOOKED_FOR = "libtensorrt_rtx.so"

# platform.machine() → e_machine of the ELF header.
_MACHINES = {"x86_64": 62, "amd64": 62, "aarch64": 183, "arm64": 183}

# Kept, because an unreferenced library may be unloaded.
_held: list[ctypes.CDLL] = []


def preload() -> None:
    """Make plugin nodes importable in TensorRT-RTX; call it before `import tensorrt_rtx`, or after.

    It does nothing where the library has that name already (systems other than Linux), and nothing when called again.

    Raises:
        MissingDependency: TensorRT-RTX is not installed, or does not support this processor.
    """
    if _held or not sys.platform.startswith("linux"):
        return
    try:
        import tensorrt_rtx  # noqa: F401  (it loads the library from the wheel)
    except ImportError as error:
        raise MissingDependency(
            "TensorRT-RTX is not installed.", why=str(error), fix="Install it: pip install 'localattn[rtx]'."
        ) from error
    if _is_loaded(LOOKED_FOR):
        return
    machine = platform.machine().lower()
    if machine not in _MACHINES:
        raise MissingDependency("TensorRT-RTX does not run here.", why=f"The processor is {machine}.")
    with temporary_folder() as folder:
        path = folder / LOOKED_FOR
        path.write_bytes(alias_library(LOOKED_FOR, SHIPPED, machine))
        _held.append(ctypes.CDLL(str(path)))


def _is_loaded(name: str) -> bool:
    """Return whether the process has loaded a library of this name; it does not search for other copies."""
    try:
        _held.append(ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
    except OSError:
        return False
    return True


def alias_library(name: str, real: str, machine: str) -> bytes:
    """Return the bytes of a 64-bit little-endian ELF shared library without code.

    Args:
        name: its name (DT_SONAME).
        real: the library it depends on (DT_NEEDED).
        machine: "x86_64" or "aarch64", as `platform.machine()` says.
    """
    strings = b"\0" + name.encode() + b"\0" + real.encode() + b"\0"
    header, program, dynamic_entry, symbol = 64, 56, 16, 24
    segments = 3
    at_strings = header + segments * program
    at_symbols = _aligned(at_strings + len(strings))
    at_hash = at_symbols + symbol  # one symbol: the null symbol that begins every table
    at_dynamic = _aligned(at_hash + 16)
    dynamic = b"".join(
        struct.pack("<QQ", tag, value)
        for tag, value in (
            (1, 1 + len(name) + 1),  # DT_NEEDED: offset of `real` in the strings
            (14, 1),  # DT_SONAME: offset of `name`
            (4, at_hash),  # DT_HASH
            (5, at_strings),  # DT_STRTAB
            (6, at_symbols),  # DT_SYMTAB
            (10, len(strings)),  # DT_STRSZ
            (11, symbol),  # DT_SYMENT
            (0, 0),  # DT_NULL
        )
    )
    size = at_dynamic + len(dynamic)
    assert len(dynamic) == 8 * dynamic_entry
    ident = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)  # 64 bits, little-endian, version 1
    elf_header = ident + struct.pack(
        "<HHIQQQIHHHHHH", 3, _MACHINES[machine.lower()], 1, 0, header, 0, 0, header, program, segments, 64, 0, 0
    )
    readable, writable = 4, 2
    programs = (
        # PT_LOAD, aligned to the largest page size; writable because the loader writes into the dynamic section.
        _program(1, readable | writable, 0, size, 0x10000),
        _program(2, readable | writable, at_dynamic, len(dynamic), 8),  # PT_DYNAMIC
        # PT_GNU_STACK: without it the loader would make the stack executable, or refuse to.
        _program(0x6474E551, readable | writable, 0, 0, 16),
    )
    image = bytearray(size)
    hash_table = struct.pack("<IIII", 1, 1, 0, 0)  # one bucket, one chain entry, both empty
    for offset, part in (
        (0, elf_header + b"".join(programs)),
        (at_strings, strings),
        (at_hash, hash_table),
        (at_dynamic, dynamic),
    ):
        image[offset : offset + len(part)] = part
    return bytes(image)


def _program(kind: int, flags: int, offset: int, size: int, alignment: int) -> bytes:
    """Return one program header: `size` bytes at `offset`, loaded at the same address relative to the base."""
    return struct.pack("<IIQQQQQQ", kind, flags, offset, offset, offset, size, size, alignment)


def _aligned(offset: int) -> int:
    return (offset + 7) & ~7
