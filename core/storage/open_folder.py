"""Work in a folder by its open descriptor, so that nobody can put another folder in its place.

Who can write to the folder above can rename a folder at any moment, and put a link there in its place. A descriptor
leads to the folder that was opened, whatever its name leads to by then. Windows has no such descriptors; there a folder
is reached by its path.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .exposed import why_exposed

# Whether the system takes a descriptor in place of the folder in a path.
HAS_DESCRIPTORS = hasattr(os, "O_DIRECTORY") and {os.open, os.mkdir, os.stat, os.unlink, os.rename, os.rmdir} <= set(
    os.supports_dir_fd
)
_FOLDER = getattr(os, "O_DIRECTORY", 0) | os.O_RDONLY
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class OpenFolder:
    """A folder that was opened.

    Args:
        path: its path when it was opened.
        descriptor: None where the system has none.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path, self.descriptor = path, descriptor

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[OpenFolder]:
        """Open a folder until the block ends; links on the way are followed."""
        folder = cls(path, os.open(path, _FOLDER) if HAS_DESCRIPTORS else None)
        try:
            yield folder
        finally:
            folder.close()

    def open(self, name: str) -> OpenFolder:
        """Open a folder in this one.

        Raises:
            OSError: there is no such folder, or it is a link.
        """
        at = None if self.descriptor is None else os.open(name, _FOLDER | _NO_LINK, dir_fd=self.descriptor)
        return OpenFolder(self.path / name, at)

    def make(self, name: str) -> None:
        """Make a folder in this one, open to its owner alone."""
        os.mkdir(self._at(name), 0o700, dir_fd=self.descriptor)

    def add(self, name: str) -> None:
        """Make an empty file; its name must be unused."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
        os.close(os.open(self._at(name), flags, 0o600, dir_fd=self.descriptor))

    def names(self) -> list[str]:
        """List what is in the folder."""
        return os.listdir(self.path if self.descriptor is None else self.descriptor)  # noqa: PTH208

    def stat(self, name: str | None = None) -> os.stat_result:
        """Return the status of the folder, or of an entry; links are not followed."""
        if name is not None:
            return os.stat(self._at(name), dir_fd=self.descriptor, follow_symlinks=False)
        return self.path.stat() if self.descriptor is None else os.fstat(self.descriptor)

    def holds(self, name: str) -> bool:
        """Return whether the folder has an entry of this name."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def is_at(self, path: Path) -> bool:
        """Return whether a path leads to this folder now."""
        try:
            return os.path.samestat(path.stat(), self.stat())
        except OSError:
            return False

    def move(self, name: str, to: OpenFolder, new: str) -> bool:
        """Move a file or a folder into another folder, over a file that is there.

        Returns:
            Whether it has the new name afterwards; False if another process gave that name to something else.
        """
        with self._held(name):  # otherwise a new file may get the same inode number
            before = self.stat(name)
            os.replace(self._at(name), to._at(new), src_dir_fd=self.descriptor, dst_dir_fd=to.descriptor)
            try:
                after = to.stat(new)
            except FileNotFoundError:
                return False
            return os.path.samestat(before, after) or _like(before) == _like(after)

    @contextmanager
    def _held(self, name: str) -> Iterator[None]:
        """Keep a file or a folder open while the block runs, where the system supports it."""
        if self.descriptor is None or not hasattr(os, "O_PATH"):
            yield
            return
        held = os.open(self._at(name), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)
        try:
            yield
        finally:
            os.close(held)

    def link(self, name: str, to: OpenFolder, new: str) -> None:
        """Give a file another name in another folder; the name must be unused."""
        os.link(self._at(name), to._at(new), src_dir_fd=self.descriptor, dst_dir_fd=to.descriptor)

    def remove_file(self, name: str) -> None:
        """Remove a file, a link or anything else but a folder."""
        os.unlink(self._at(name), dir_fd=self.descriptor)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        os.rmdir(self._at(name), dir_fd=self.descriptor)

    def clear(self, last: str | None = None) -> None:
        """Remove the folder's contents, the entry `last` at the end; links are removed, not followed.

        What cannot be removed stays.
        """
        for name in sorted(self.names(), key=lambda name: name == last):
            with contextlib.suppress(OSError):
                if not stat.S_ISDIR(self.stat(name).st_mode):
                    self.remove_file(name)
                    continue
                below = self.open(name)
                try:
                    below.clear()
                finally:
                    below.close()
                self.remove_folder(name)

    def flush(self, name: str | None = None) -> None:
        """Wait until the bytes of a file, or the names in the folder, are on the disk."""
        if name is None and self.descriptor is not None:
            os.fsync(self.descriptor)
        elif name is not None:
            # Windows flushes only files that are open for writing, and no folders.
            mode = os.O_RDONLY if HAS_DESCRIPTORS else os.O_RDWR
            opened = os.open(self._at(name), mode | _NO_LINK, dir_fd=self.descriptor)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)

    def way_in(self) -> Path:
        """Return a path to this folder for code that takes paths.

        Where others could rename the folder, that is the path of the descriptor, which Linux has in `/proc` and macOS
        in `/.vol`. Without those it is the folder's own path, and who renames the folder at the right moment is
        followed.
        """
        try:
            exposed = why_exposed(self.path.parent)
        except OSError:
            exposed = "unknown"
        if not exposed or self.descriptor is None:
            return self.path
        state = self.stat()
        # Not /proc/self, because child processes must find the folder too.
        for way in (f"/proc/{os.getpid()}/fd/{self.descriptor}", f"/.vol/{state.st_dev}/{state.st_ino}"):
            if self.is_at(Path(way)):
                return Path(way)
        return self.path

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)

    def _at(self, name: str) -> str:
        return name if self.descriptor is not None else str(self.path / name)


def _like(state: os.stat_result) -> tuple[int, int, int]:
    """Return properties of a file that stay the same when it is renamed, on any file system."""
    return state.st_uid, state.st_size, state.st_mtime_ns
