"""Define the largest numbers that commands accept; larger ones are typing errors or attacks."""

from __future__ import annotations

import os

from .errors import UsageError

LARGEST_SEED = (1 << 63) - 1
# Sequence lengths, batches, heads, tokens: what ONNX Runtime and TensorRT count in 32 bits.
LARGEST_SIZE = (1 << 31) - 1
MOST_SEEDS = 10_000
MOST_ITERATIONS = 1_000_000
MOST_ROUNDS = 10_000
LONGEST_SECONDS = 7 * 24 * 3600.0
LARGEST_WORKSPACE_MIB = 1 << 20  # 1 TiB: TensorRT counts bytes in 64 bits
MOST_JOBS = 1024
_THREADS_ANYWHERE = 256


def is_size(text: str) -> bool:
    """Check whether a text is a size: a number from 1 to `LARGEST_SIZE`."""
    return text.isdecimal() and len(text) <= len(str(LARGEST_SIZE)) and 1 <= int(text) <= LARGEST_SIZE


def most_threads() -> int:
    """Return the most threads that an operator may run on: 4 per processor, and at least 256."""
    return max(_THREADS_ANYWHERE, 4 * (os.cpu_count() or 1))


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that is below 1 or far above the number of processors.

    Raises:
        UsageError: it is below 1 or above `most_threads()`.
    """
    if threads is None or 1 <= threads <= most_threads():
        return
    raise UsageError(
        f"threads is {threads}.",
        why="An operator needs at least one thread."
        if threads < 1
        else f"This machine has {os.cpu_count()} processors; at most {most_threads()} threads are accepted.",
        fix="Leave it out: the engine then chooses by the number of processors.",
    )
