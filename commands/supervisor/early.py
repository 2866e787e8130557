"""Answer Ctrl-C while the command line is still imported: nothing has begun, so the process ends at once."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # `typing` itself takes long to import
if TYPE_CHECKING:
    import signal as _signal
    from types import FrameType
    from typing import NoReturn
else:
    try:
        import _signal  # built in; the module `signal` imports `enum`, during which Ctrl-C would be a traceback
    except ImportError:
        import signal as _signal


def leave_quietly(number: int, _: FrameType | None) -> NoReturn:
    """End this process, with 128 + the number of the signal as its exit code."""
    os._exit(128 + number)


def answer_quietly() -> None:
    """Let Ctrl-C end this process without a traceback, unless it is ignored, as in the background."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, leave_quietly)


def answers_quietly() -> bool:
    """Return whether Ctrl-C is still answered so."""
    return _signal.getsignal(_signal.SIGINT) is leave_quietly
