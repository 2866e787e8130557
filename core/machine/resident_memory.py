"""Give memory back between the steps of an export, so that its peak is that of one step and not of their sum.

Freed memory stays with the C library, and pages of a mapped checkpoint stay resident once they were read. Linux with
glibc takes both back on request; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

_MAPS = Path("/proc/self/smaps")
_DONT_NEED = 4  # MADV_DONTNEED of <sys/mman.h>: pages of a file are read again when they are next looked at


def release_memory(mapped: Path | None = None) -> None:
    """Return freed memory to the system, and the pages of a mapped file.

    Args:
        mapped: a file whose tensors may be mapped into memory. A mapping that was written to stays as it is.
    """
    library = _glibc()
    if library is None:
        return
    library.malloc_trim(0)
    if mapped is not None:
        for start, end in _mappings(mapped):
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)


def release_memory_around(addresses: Iterable[int]) -> None:
    """Return to the system the pages of mapped files that hold these addresses."""
    library, wanted = _glibc(), sorted(addresses)
    if library is None:
        return
    for start, end in _mappings():
        at = bisect_left(wanted, start)
        if at < len(wanted) and wanted[at] < end:
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None


def _mappings(path: Path | None = None) -> list[tuple[int, int]]:
    """Return where this process maps the file, or any file, as `[start, end)`, without modified mappings."""
    wanted, found = None if path is None else str(path.resolve()), []
    mapped: tuple[int, int] | None = None
    for line in _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if not fields[0].endswith(":"):  # a mapping begins: addresses, rights, offset, device, inode, path
            start, end = (int(address, 16) for address in fields[0].split("-"))
            named = len(fields) == 6 and fields[5].startswith("/")
            mapped = (start, end) if named and wanted in (None, fields[5]) else None
        elif fields[0] == "Anonymous:" and mapped is not None and fields[1] == "0":
            found.append(mapped)
    return found
