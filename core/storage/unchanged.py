"""Notice that a file changed between the moment it was read and the moment it was hashed.

Readers open files by path, and so does the SHA-256 that a sidecar records. If a file is replaced or rewritten between
the two, the digest is that of other weights. The identity of a file (device, inode, size, time of its last change) is
taken before the first read and again after the last one. Nobody but the administrator can set the time of the last
change (`ctime`), and renaming a file changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UsageError

Identity = tuple[int, int, int, int, int]


class Unchanged:
    """Record the identity of files when they are added.

    Args:
        paths: the files; links are followed.

    Raises:
        UsageError: a file cannot be looked at.
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._known: dict[Path, Identity] = {}
        self.add(paths)

    def add(self, paths: Iterable[Path]) -> None:
        """Record the identity of more files before they are read; keep the identity of known files.

        Raises:
            UsageError: a file cannot be looked at.
        """
        self._known |= {path: identity(path) for path in paths if path not in self._known}

    def check(self) -> None:
        """Check that no file changed.

        Raises:
            UsageError: a file was replaced, or its contents changed.
        """
        for path, known in self._known.items():
            if identity(path) != known:
                raise UsageError(
                    f"{path} changed while it was read.",
                    why="Its weights and its SHA-256 would belong to two different files.",
                    fix="Wait until nothing writes to it, or copy it; then run again.",
                )


@contextmanager
def unchanged(paths: Iterable[Path] = ()) -> Iterator[Unchanged]:
    """Check at the end of a block that no file changed since its beginning.

    Raises:
        UsageError: one did, or cannot be looked at.
    """
    files = Unchanged(paths)
    yield files
    files.check()


def identity(path: Path) -> Identity:
    """Return the identity of a file; links are followed.

    Raises:
        UsageError: the file cannot be looked at.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        why = f"{getattr(error, 'strerror', None) or error}."
        raise UsageError(f"Cannot read {path}.", why=why, fix="Check the path.") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
