"""Return memory to the system between the steps of an export, so that the peak is that of the largest step.

Freed memory stays with the C library, and pages of a mapped checkpoint stay resident once they were read. Linux with
glibc takes both back on request; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

_SELF = Path("/proc/self")
# /proc/self/pagemap: an entry a page; smaps, which sums up the same, walks through all memory of the process.
_ENTRY = np.dtype(np.uint64)
_PRESENT, _SWAPPED, _OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
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
        wanted = str(mapped.resolve())
        _drop_pages(library, [(start, end) for start, end, path in _mapped_files() if path == wanted])


def release_memory_around(addresses: Iterable[int]) -> None:
    """Return to the system the pages of mapped files that hold these addresses."""
    library, wanted = _glibc(), sorted(addresses)
    if library is None:
        return
    _drop_pages(library, [(start, end) for start, end, _ in _mapped_files() if _one_within(wanted, start, end)])


def _one_within(addresses: Sequence[int], start: int, end: int) -> bool:
    at = bisect_left(addresses, start)
    return at < len(addresses) and addresses[at] < end


def _drop_pages(library: ctypes.CDLL, mappings: Iterable[tuple[int, int]]) -> None:
    """Return pages of mappings to the system, except pages that were written to."""
    for start, end in mappings:
        if _is_unwritten(start, end):
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None


def _mapped_files() -> list[tuple[int, int, str]]:
    """Return where this process maps files, as `[start, end)`, and their paths."""
    found = []
    for line in (_SELF / "maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)  # addresses, rights, offset, device, inode, path
        if len(fields) == 6 and fields[5].startswith("/"):
            start, end = fields[0].split("-")
            found.append((int(start, 16), int(end, 16), fields[5]))
    return found


def _is_unwritten(start: int, end: int) -> bool:
    """Return whether no page of a mapped file was written to, which would make it the process's own."""
    first, last = start // mmap.PAGESIZE, end // mmap.PAGESIZE
    try:
        with (_SELF / "pagemap").open("rb") as file:
            file.seek(first * _ENTRY.itemsize)
            pages = np.frombuffer(file.read((last - first) * _ENTRY.itemsize), _ENTRY)
    except OSError:  # a system that does not report it
        return False
    own = (pages & _PRESENT != 0) & (pages & _OF_A_FILE == 0)
    return pages.size == last - first and not (own | (pages & _SWAPPED != 0)).any()
