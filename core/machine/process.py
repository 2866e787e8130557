"""Manage settings of the process: whether it is ours, telemetry off, workers that end with their parent."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Whether this process is the command line or one of its workers. Only then may settings be changed that hold for a
# whole process, such as the level of onnxruntime's logger.
owned = False


def without_telemetry() -> None:
    """Keep an onnxruntime that is imported after this from sending telemetry and from writing its files.

    Release 1.31 writes `~/.cache/Microsoft` and `.ses` in the temporary folder as it is imported. What the user's
    environment says takes precedence. Source: Privacy.md of its wheel.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


@contextmanager
def quiet_loggers(names: Sequence[str]) -> Iterator[None]:
    """Let these loggers of other packages report errors only, as long as the context is open."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def end_with_parent() -> None:
    """End this process as soon as its parent is gone; meant as the initializer of a pool.

    A pool's workers do not notice by themselves that their parent was killed, and go on with their task.
    """
    import multiprocessing
    import threading

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.sentinel,), name="parent watch", daemon=True).start()


def _watch(sentinel: int) -> None:
    from multiprocessing.connection import wait

    wait([sentinel])
    os._exit(1)  # the parent is gone, so there is nobody to report to
