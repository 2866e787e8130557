"""What the workers of one run of pytest share: a folder, in which each thing is made once, by who asks first."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_VARIABLE = "LOCALATTN_TESTS_RUN"


def begin() -> bool:
    """Make the folder of the run; False in a worker, whose parent has made it."""
    if _VARIABLE in os.environ:
        return False
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="localattn-tests-")
    return True


def end() -> None:
    """Remove the folder of the run."""
    shutil.rmtree(os.environ.pop(_VARIABLE), ignore_errors=True)


def once(name: str, make: Callable[[Path], object]) -> Path:
    """A folder of the run, filled by `make` the first time; who else asks waits for it and gets the same.

    A program that is no run of pytest has a folder of its own. Where `make` fails, its exception goes to who asked, and
    the next one to ask tries again.
    """
    if begin():
        atexit.register(end)
    place = Path(os.environ[_VARIABLE]) / name
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(f"{place}.made")
    with Path(f"{place}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            make(place)
            made.touch()
    return place
