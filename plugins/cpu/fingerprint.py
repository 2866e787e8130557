"""A digest of everything that the CPU library is made from, which differs between releases."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..shared_library import digest_of, files_of

_HERE = Path(__file__).parent
SOURCES = _HERE / "source"


@cache
def fingerprint() -> str:
    """Return the digest of the library's sources and of the code that compiles them."""
    return digest_of((*files_of(SOURCES), _HERE / "build.py", _HERE.parent / "shared_library.py"))
