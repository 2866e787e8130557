"""Run the command in a child process, and report its end even after a crash.

Native code of libraries crashes, aborts, and does not end when it is asked to. So the command line forks before it
imports them. The child does the work, with the terminal, the streams and the process group that the command line was
started with. The parent waits. It passes on requests to end, and kills the child where they are not followed in time;
it removes the temporary folders that the child has noted (`core.at_work`), and reports a death as one error.

A library's own output on stderr takes a way of its own, through `native_output`: the child's stderr of Python is the
user's, its descriptor 2 is a pipe to the parent.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ...core import at_work
from ...core.errors import ExitCode
from ..parts import console, streams
from . import descendants
from .native_output import NativeOutput

if TYPE_CHECKING:
    from mmap import mmap

# With this variable, and any value, the command runs in the process that was started: for debuggers and profilers.
ONE_PROCESS = "LOCALATTN_ONE_PROCESS"
# Seconds in which a command that was asked to end may do so by itself.
GRACE = 1.5
# Requests to end.
REQUESTS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
# Below this number programs expect standard streams.
_FIRST_DESCRIPTOR = 10
_SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"


def possible(arguments: Sequence[str]) -> bool:
    """Check whether the command is run in a child: not for help, in a debugger, or where a program calls `main`.

    Args:
        arguments: of the command line, without the program's name.
    """
    only_text = not arguments or arguments[0] in ("-h", "--help", "--version")
    if only_text or not hasattr(os, "fork") or os.environ.get(ONE_PROCESS) or "_LOCALATTN_COMPLETE" in os.environ:
        return False
    monitored = getattr(sys, "monitoring", None)
    traced = sys.gettrace() or sys.getprofile() or (monitored and any(map(monitored.get_tool, range(6))))
    return not streams.replaced() and not traced and threading.active_count() == 1


def supervise() -> bool:
    """Fork; return True in the child, which does the work with `run_and_end`. The parent never returns.

    Signals are held in the child until `release_signals`. Where no process can be made, return False: this one does
    the work.

    Raises:
        SystemExit: in the parent, with the exit code of the command.
    """
    streams.open_closed()
    hold_signals()
    memory = at_work.shared_memory()
    output, libraries = os.pipe()
    trace = _memory_file()
    spared = descendants.children()
    descendants.adopt_orphans()
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):  # what a calling program has printed is written once, and first
        with contextlib.suppress(Exception):
            stream.flush()
    gc.freeze()  # collecting what both share would copy it
    # A caller may have ignored SIGCHLD: then nobody could learn how the child ended.
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        child = os.fork()
    except OSError:
        signal.signal(signal.SIGCHLD, before)
        for descriptor in (output, libraries, trace):
            _close(descriptor)
        return False
    if child:
        os.close(libraries)
        raise SystemExit(_Supervisor(child, memory, output, trace, spared).code())
    global _answered_for
    _answered_for = True
    signal.signal(signal.SIGCHLD, before)
    os.close(output)
    descendants.die_with(parent)
    streams.keep_remarks(_second_stderr())
    os.dup2(libraries, 2)
    os.close(libraries)
    at_work.share(memory)
    _trace_crashes(trace)
    return True


def run_and_end(work: Callable[[], NoReturn]) -> NoReturn:
    """Do the work in the child and end it; the caller of the command line continues only in the parent.

    It ends as Python does, with threads waited for and exit functions run, but libraries are not taken apart.
    """
    import atexit
    import ctypes

    code = 1
    try:
        work()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
            ctypes.CDLL(None).fflush(None)
        os._exit(code)


_held: set[signal.Signals] | None = None
# Whether this process is the child, which the parent ends in time.
_answered_for = False


def hold_signals() -> None:
    """Hold signals to end back until `release_signals`."""
    global _held
    if _held is None:
        _held = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in REQUESTS])  # type: ignore[assignment]


def release_signals() -> None:
    """Deliver the held signals."""
    global _held
    if _held is not None:
        held, _held = _held, None
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def end_undisturbed() -> None:
    """Hold requests to end back for good in the child, whose work is done: they would interrupt how Python ends."""
    if _answered_for:
        hold_signals()


class _Supervisor:
    """The parent's part.

    Args:
        child: its number.
        memory: where it keeps its notes.
        output: the pipe on which its libraries' output comes.
        trace: the file in memory for the place of a crash; -1 if there is none.
        spared: children that this process had before.
    """

    def __init__(self, child: int, memory: mmap, output: int, trace: int, spared: set[int]) -> None:
        self._child, self._memory, self._trace, self._spared = child, memory, trace, spared
        self._output = output
        self._asked = 0
        self._ended = False
        self._libraries = NativeOutput(lambda line: print(line, file=sys.stderr, flush=True))
        self._terminal = _terminal_settings()

    def code(self) -> int:
        """Wait until the command has ended; return the exit code, once every error has been shown."""
        streams.prepare()
        status, peak = self._wait()
        notes = at_work.read_notes(self._memory)
        by_itself = os.WIFEXITED(status) and os.WEXITSTATUS(status) == notes.code
        # After an error too: `bench` reports the death of a candidate, whose processes are adopted here.
        if self._asked or not by_itself or os.WEXITSTATUS(status) != ExitCode.OK:
            descendants.end_children(self._spared)
        self._libraries.end()
        console.Verbosity.verbose = notes.verbose
        if notes.verbose:
            for line in (*self._libraries.kept, *(self._crash() if not by_itself else ())):
                print(f"{console.FOREIGN}{line}", file=sys.stderr)
        if by_itself:
            return os.WEXITSTATUS(status)
        self._restore_terminal()
        left = at_work.remove_left(notes)
        if notes.code is not None:  # the work was done; what crashed is the end of a library
            return notes.code
        if self._asked:
            console.print_stopped(notes.written, left)
            return 128 + self._asked
        from .deaths import error_of

        error = error_of(status, notes, self._libraries.last_lines(), peak)
        console.print_error(error)
        return error.exit_code

    def _wait(self) -> tuple[int, int]:
        """Wait for the child; return its status, and the most memory it held, in bytes."""
        wake, woken = os.pipe()
        for descriptor in (wake, woken, self._output):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGALRM, self._kill)
        for number in (getattr(signal, name) for name in REQUESTS):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._pass_on)
        release_signals()
        watched = [wake, self._output]
        while True:
            ended, status, used = os.wait4(self._child, os.WNOHANG)
            if ended:
                self._ended = True
                signal.setitimer(signal.ITIMER_REAL, 0)
                self._read()
                return status, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            ready, _, _ = select.select(watched, [], [])
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            if self._output in ready and not self._read():
                watched.remove(self._output)

    def _read(self) -> bool:
        """Read the output of libraries; return False at its end."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output, 65536):
                self._libraries.feed(data)
            return False
        return True

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        """Pass a request to end on to the child, which has `GRACE` seconds from the first one."""
        if not self._asked:
            self._asked = number
            signal.setitimer(signal.ITIMER_REAL, GRACE)
        self._signal(number)

    def _kill(self, *_: object) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._ended:  # its number may be another process's
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _crash(self) -> list[str]:
        """Return where the child crashed, as lines."""
        from ...core.spelling import spelled

        if self._trace < 0:
            return []
        os.lseek(self._trace, 0, os.SEEK_SET)
        text = os.read(self._trace, 1 << 20).decode("utf-8", "replace")
        return [spelled(line) for line in text.splitlines()]

    def _restore_terminal(self) -> None:
        """Leave the terminal as it was found: a progress line that died hides the cursor."""
        if self._terminal is not None:
            import termios

            with contextlib.suppress(termios.error, OSError):
                # From the background a process that sets a terminal would be stopped.
                before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                termios.tcsetattr(0, termios.TCSANOW, self._terminal)
                signal.signal(signal.SIGTTOU, before)
        if sys.stderr.isatty():
            print(_SHOW_CURSOR, end="", file=sys.stderr, flush=True)


def _terminal_settings() -> list[Any] | None:
    if not os.isatty(0):
        return None
    import termios

    with contextlib.suppress(termios.error):
        return termios.tcgetattr(0)
    return None


def _memory_file() -> int:
    """Open a file in memory; -1 if the system has none."""
    try:
        return os.memfd_create("localattn-crash")
    except (AttributeError, OSError):
        return -1


def _trace_crashes(descriptor: int) -> None:
    """Let Python write its position into this file when the process crashes."""
    import faulthandler

    if descriptor >= 0 and not faulthandler.is_enabled():
        faulthandler.enable(file=descriptor)


def _second_stderr() -> int:
    """Return another descriptor of stderr, above those that programs number themselves."""
    import fcntl

    found: int = fcntl.fcntl(2, getattr(fcntl, "F_DUPFD_CLOEXEC", fcntl.F_DUPFD), _FIRST_DESCRIPTOR)
    return found


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)
