"""How much memory this process may have: what the machine has, and what its limits leave of it."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import MissingDependency

try:
    import resource
except ImportError:  # not on Windows, which is asked for nothing here
    resource = None  # type: ignore[assignment]

_CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_limit() -> int | None:
    """Bytes of memory that this process can have at the most; None where the system does not tell."""
    known = [*_physical(), *_of_cgroup(), *_of_process()]
    return min(known, default=None)


def check_fits(what: str, size: int, fix: str) -> None:
    """Refuse what cannot fit into memory, before any of it is asked for.

    Args:
        what: begins the error, as "Input 'x' of float32 [1, 64]".
        size: bytes it takes at the least.
        fix: what the user can do.

    Raises:
        MissingDependency: this process can never have so much memory.
    """
    limit = memory_limit()
    if limit is not None and size > limit:
        raise MissingDependency(
            f"{what} does not fit into memory.",
            why=f"It takes {size / 2**30:,.1f} GiB, and this process can have {limit / 2**30:,.1f} GiB.",
            fix=fix,
        )


def _physical() -> list[int]:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return []
    return [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]


def _of_cgroup() -> list[int]:
    """The limit of a container; the word "max" is none."""
    found = []
    for file in _CGROUPS:
        try:
            text = file.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        found += [int(text)] if text.isdecimal() else []
    return found


def _of_process() -> list[int]:
    if resource is None:
        return []
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return [] if soft == resource.RLIM_INFINITY else [soft]
