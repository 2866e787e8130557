"""Give the digest of the sources of each kind of library, without importing the plugins.

`localattn/__init__.py` registers the functions that compute it; that costs nothing until a digest is needed.
"""

from __future__ import annotations

from collections.abc import Callable

_REGISTERED: dict[str, Callable[[], str]] = {}


def register_fingerprint(kind: str, compute: Callable[[], str]) -> None:
    """Register the function that computes the digest of the sources of a kind of library."""
    _REGISTERED[kind] = compute


def fingerprint_of(kind: str) -> str:
    """Return the digest of a library's sources in this release; KeyError for an unknown kind."""
    return _REGISTERED[kind]()
