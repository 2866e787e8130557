"""Telling libraries of other releases apart: a digest of everything that the library is made from."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..shared_library import digest_of

_HERE = Path(__file__).parent
SOURCES = _HERE / "source"


@cache
def fingerprint() -> str:
    """Return the digest of the sources of the library, and of what puts them together."""
    return digest_of((*sorted(SOURCES.iterdir()), _HERE / "build.py", _HERE.parent / "shared_library.py"))
