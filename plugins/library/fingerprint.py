"""Telling libraries of other releases apart: a digest of everything that a library is made from."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..shared_library import digest_of

_HERE = Path(__file__).parent
_KERNEL = _HERE.parent / "kernel"


@cache
def fingerprint() -> str:
    """Digest of the sources of the library, of its kernels, and of what puts them together."""
    sources = (*sorted((_HERE / "source").iterdir()), *sorted(_KERNEL.glob("*.py")))
    return digest_of((*sources, _HERE / "build.py", _HERE / "embed.py", _HERE.parent / "shared_library.py"))
