"""The process: whether it is ours, and workers that end when the process that started them does."""

from __future__ import annotations

import os

# Whether the process is the command line's, or a worker's of it: settings that hold for a whole process, as that of
# onnxruntime's logger, are changed there and nowhere else.
owned = False


def end_with_parent() -> None:
    """Let this process end as soon as its parent is gone; the initializer of a pool.

    A pool's workers do not notice by themselves: a killed parent cannot tell them, and they go on with their task.
    """
    import multiprocessing
    import threading

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.sentinel,), name="parent watch", daemon=True).start()


def _watch(sentinel: int) -> None:
    from multiprocessing.connection import wait

    wait([sentinel])
    os._exit(1)  # nobody is left to tell
