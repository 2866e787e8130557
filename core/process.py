"""Worker processes that end when the process that started them does, even by a kill."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """Let this process end as soon as its parent is gone; the initializer of a pool.

    A pool's workers do not notice by themselves: a killed parent cannot tell them, and they go on with their task.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.sentinel,), name="parent watch", daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)  # nobody is left to tell
