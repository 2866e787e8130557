"""A digest of everything that a plugin library is made from, which differs between releases."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..shared_library import digest_of, files_of

_HERE = Path(__file__).parent
_KERNEL = _HERE.parent / "kernel"


@cache
def fingerprint() -> str:
    """Return the digest of the sources of the library, of its kernels, and of the code that compiles them."""
    cpp = (*files_of(_HERE / "source"), *files_of(_HERE / "companion"))
    sources = (*cpp, *sorted(_KERNEL.glob("*.py")))
    return digest_of((*sources, _HERE / "build.py", _HERE / "embed.py", _HERE.parent / "shared_library.py"))
