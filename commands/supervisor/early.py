"""Answer Ctrl-C while the command line is still imported: nothing has begun, so the process ends at once."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # `typing` itself takes long to import
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


def leave_quietly(number: int, _: FrameType | None) -> NoReturn:
    """End this process, with 128 + the number of the signal as its exit code."""
    os._exit(128 + number)


def answer_quietly() -> None:
    """Let Ctrl-C end this process without a traceback, unless it is ignored, as in the background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_quietly)


def answers_quietly() -> bool:
    """Return whether Ctrl-C is still answered so."""
    return signal.getsignal(signal.SIGINT) is leave_quietly
