"""Compute digests of the sources of each kind of library, which differ between releases."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
# By the names of `core.storage.library_store.KINDS`: the sources of a library, and the code that compiles them.
_MADE_FROM = {
    "kernels": ("cpu/source/**/*", "cpu/build.py", "shared_library.py"),
    "plugin": (
        *("library/source/**/*", "library/companion/*", "kernel/*.py"),
        *("library/build.py", "library/embed.py", "shared_library.py"),
    ),
}


@cache
def fingerprint(kind: str) -> str:
    """Hash the names and contents of a library's sources in this release; KeyError for an unknown kind."""
    digest = hashlib.sha256()
    for pattern in _MADE_FROM[kind]:
        for path in sorted(_HERE.glob(pattern)):
            if path.is_file():
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
