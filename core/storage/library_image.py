"""Read a library once and load exactly the bytes that were read, so that it cannot change between check and load.

The standard library is enough: bundles carry this file to devices without localattn.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows, which has no memory files either
    fcntl = None  # type: ignore[assignment]

# The largest library that is read; those of this package have a few megabytes.
MAX_LIBRARY = 1 << 30

_lock = threading.Lock()
_images: dict[str, str] = {}


def read_regular_file(path: str | os.PathLike[str], most: int = MAX_LIBRARY, *, follow_link: bool = False) -> bytes:
    """Read a regular file through one descriptor.

    Args:
        path: the file.
        most: the most bytes it may have.
        follow_link: accept a symbolic link as the last component.

    Raises:
        OSError: it cannot be opened, is a link, a folder, a pipe or a device, or is larger than `most`.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    flags |= getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer must not block the process
    flags |= 0 if follow_link else getattr(os, "O_NOFOLLOW", 0)
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file", os.fspath(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"It has more than {most} bytes", os.fspath(path))
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"It has more than {most} bytes", os.fspath(path))
    return data


def loadable(data: bytes, name: str) -> str:
    """Return a path from which the dynamic loader gets exactly these bytes, until the process ends.

    On Linux it leads to a sealed file in memory. Its descriptor stays open: the loader remembers libraries by their
    path, so the number must not be used again for another library. Elsewhere it leads to a copy in a private folder.

    Args:
        data: the library.
        name: its file name, for debuggers and for the copy.

    Raises:
        OSError: neither can be written.
    """
    digest = hashlib.sha256(data).hexdigest()
    with _lock:
        if digest not in _images:
            _images[digest] = _in_memory(data, name) or _in_private_folder(data, name)
        return _images[digest]


def for_child(image: str) -> str:
    """Return the path by which another process of this user opens a `loadable` library, while this process lives."""
    return image.replace("/proc/self/", f"/proc/{os.getpid()}/")


def _in_memory(data: bytes, name: str) -> str:
    """Write a sealed memory file and return its path; "" if the system has no such files."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return ""
    path = f"/proc/self/fd/{descriptor}"
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as stream:
            stream.write(data)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):  # noqa: PTH116 - /proc may be missing
            return path
    except OSError:
        pass
    os.close(descriptor)
    return ""


def _in_private_folder(data: bytes, name: str) -> str:
    """Write a copy that only this user can read or replace, removed when the process ends, and return its path."""
    folder = tempfile.mkdtemp(prefix="localattn-library-")  # of mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder, name)
    copy.write_bytes(data)
    with contextlib.suppress(OSError):
        copy.chmod(0o500)
    return str(copy)
