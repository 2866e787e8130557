"""Telling libraries of other releases apart: a digest of everything that a library is made from."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
_KERNEL = _HERE.parent / "kernel"


@cache
def fingerprint() -> str:
    """Digest of the sources of the library, of its kernels, and of what puts them together."""
    sources = (*sorted((_HERE / "source").iterdir()), *sorted(_KERNEL.glob("*.py")))
    digest = hashlib.sha256()
    for path in (*sources, _HERE / "build.py", _HERE / "embed.py", _HERE.parent / "shared_library.py"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
