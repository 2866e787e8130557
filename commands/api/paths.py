"""Turn optional paths of callers into `Path`."""

from __future__ import annotations

from pathlib import Path


def as_path(path: str | Path | None) -> Path | None:
    """Return the path; None stays None."""
    return None if path is None else Path(path)
