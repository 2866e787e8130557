"""Give memory back between the steps of an export, so that its peak is that of one step and not of their sum.

Freed memory stays with the C library, and pages of a mapped checkpoint stay resident once they were read. Linux with
glibc takes both back on request; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_SELF = Path("/proc/self")
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


def _drop_pages(library: ctypes.CDLL, mappings: Sequence[tuple[int, int]]) -> None:
    """Return the pages of mappings to the system, but of those that were written to."""
    if not mappings:  # asking what was written to walks through all memory
        return
    unwritten = _unwritten()
    for start, end in mappings:
        if (start, end) in unwritten:
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None


def _mapped_files() -> Iterator[tuple[int, int, str]]:
    """Yield where this process maps files, as `[start, end)`, and their paths."""
    for line in _read("maps"):
        fields = line.split(maxsplit=5)  # addresses, rights, offset, device, inode, path
        if len(fields) == 6 and fields[5].startswith("/"):
            yield *_addresses(fields[0]), fields[5]


def _unwritten() -> set[tuple[int, int]]:
    """Return the mappings, as `[start, end)`, without a page of this process's own."""
    found = set()
    mapped = (0, 0)
    for line in _read("smaps"):
        fields = line.split(maxsplit=2)
        if not fields[0].endswith(":"):  # a mapping begins
            mapped = _addresses(fields[0])
        elif fields[0] == "Anonymous:" and fields[1] == "0":
            found.add(mapped)
    return found


def _read(name: str) -> list[str]:
    return (_SELF / name).read_text(encoding="utf-8", errors="surrogateescape").splitlines()


def _addresses(text: str) -> tuple[int, int]:
    start, end = text.split("-")
    return int(start, 16), int(end, 16)
