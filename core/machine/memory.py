"""Find how much memory this process may use: the machine's memory, or less if limits are set."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import MissingDependency

try:
    import resource
except ImportError:  # Windows has no such module
    resource = None  # type: ignore[assignment]

_CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_limit() -> int | None:
    """Return the most bytes of memory that this process may use; None if the system does not say."""
    known = [*_physical(), *_of_cgroup(), *_of_process()]
    return min(known, default=None)


def check_fits(what: str, size: int, fix: str) -> None:
    """Refuse a size that cannot fit into memory, before it is allocated.

    Args:
        what: beginning of the error's text, as "Input 'x' of float32 [1, 64]".
        size: bytes it takes at the least.
        fix: what the user can do.

    Raises:
        MissingDependency: this process can never have so much memory.
    """
    limit = memory_limit()
    if limit is not None and size > limit:
        raise MissingDependency(
            f"{what} does not fit into memory.",
            why=f"It needs {size / 2**30:,.1f} GiB, and this process may use {limit / 2**30:,.1f} GiB.",
            fix=fix,
        )


def _physical() -> list[int]:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return []
    return [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]


def _of_cgroup() -> list[int]:
    """Return the limits of a container, as a list; the word "max" means no limit."""
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
