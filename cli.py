"""Put the command line together from one file per verb in `commands/`.

Errors end with the exit codes of `core.errors.ExitCode`. Nothing heavy is imported until a command runs, and only the
requested command is imported.
"""

from __future__ import annotations

import sys

if not __package__:  # `python cli.py` in a source tree: make the tree the package `localattn`
    import importlib.util
    from pathlib import Path

    _root = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != _root]
    _spec = importlib.util.spec_from_file_location(
        "localattn", _root / "__init__.py", submodule_search_locations=[str(_root)]
    )
    assert _spec is not None and _spec.loader is not None
    sys.modules["localattn"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["localattn"])
    __package__ = "localattn"

if __name__ == "__main__":
    from . import _answer_quietly

    _answer_quietly()

import inspect
import re
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from . import _leave_quietly
from .commands.api.packages import missing_package
from .commands.parts import completion, streams
from .commands.parts.console import (
    Stopped,
    Verbosity,
    first_line,
    print_error,
    print_fault,
    print_stopped,
    show_log,
    show_warning,
    with_messages,
)
from .commands.parts.paths import checked
from .commands.parts.terminal.help import Command, Group
from .commands.supervisor import supervise
from .core import at_work
from .core.errors import ExitCode, LocalAttnError, MissingDependency
from .core.machine import process

# Modules of `commands/`, in the order of the help. A module of several verbs has an `app`, any other a function of its
# own name.
COMMANDS = (
    *("export", "convert", "parity", "build", "run", "generate", "bench", "inspect"),
    *("plugin", "bundle", "bisect", "doctor", "demo"),
)

_EPILOG = (
    "Exit codes: 0 good, 1 a check failed, 2 wrong usage or input, 3 something is missing on this machine, "
    "4 the export failed, 5 a build failed."
)


# PyTorch's texts for a lack of memory, in a RuntimeError.
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory: you tried to allocate|std::bad_alloc")
# Seconds until a request to end that Python dropped is raised again.
_MOMENT = 0.001


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"localattn {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def command_line(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """Make the command line with these commands; only they are imported."""
    app = typer.Typer(
        name="localattn",
        cls=Group,
        help="Export trained local-attention models to ONNX files that are checked against the original.",
        epilog=_EPILOG,
        no_args_is_help=True,
        rich_markup_mode="markdown",  # paragraphs flow, and [sizes] is no markup
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in names:
        module = import_module(f".commands.{name}", __package__)
        if hasattr(module, "app"):
            for command in module.app.registered_commands:
                callback = checked(inspect.unwrap(command.callback))
                command.callback, command.cls = with_messages(callback), Command
            app.add_typer(module.app)
        else:
            app.command(cls=Command)(with_messages(checked(getattr(module, name))))
    return app


def main() -> None:
    """Run the command line and exit with its exit code; the work is done in a child process if possible."""
    if signal.getsignal(signal.SIGINT) is _leave_quietly:  # from here on work may have to be cleaned up
        supervise.hold_signals()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if supervise.possible(sys.argv[1:]) and supervise.supervise():
        supervise.run_and_end(in_this_process)
    in_this_process()


def in_this_process() -> NoReturn:
    """Run the command line here and exit with its exit code."""
    at_work.begin()
    streams.prepare()
    completion.prepare(sys.argv)
    process.owned = True
    process.without_telemetry()
    show_log()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning  # type: ignore[assignment]
            code = _run()
        sys.stdout.flush()
    except streams.OutputLost as error:
        print_error(error)
        streams.discard_output()
        code = error.exit_code
    except streams.ReaderGone:
        streams.discard_output()
        code = ExitCode.OK
    at_work.ends_with(code)
    sys.exit(code)


def _run() -> int:
    """Run the command line; return its exit code, once every error has been shown.

    Raises:
        OutputLost: stdout cannot be written.
        ReaderGone: the reader of stdout has closed it.
    """
    asked = tuple(sys.argv[1:2])
    requests: list[int] = []
    try:
        with _unwinding(requests):
            command_line(asked if set(asked) & set(COMMANDS) else COMMANDS)()
    except (KeyboardInterrupt, Stopped) as ended:
        print_stopped(at_work.written())
        return ended.code if isinstance(ended, Stopped) else 128 + signal.SIGINT
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except (streams.OutputLost, streams.ReaderGone):
        raise
    except Exception as error:
        known = _known(error)
        if requests and (known is not error or _stems_from_request(error)):
            print_stopped(at_work.written())
            return 128 + requests[0]
        if known is None:
            print_fault(error)
            return ExitCode.INTERNAL
        print_error(known)
        return known.exit_code
    return ExitCode.OK


def _stems_from_request(error: BaseException | None) -> bool:
    """Return whether a request to end became this error in code that it interrupted."""
    while error is not None:
        if isinstance(error, (KeyboardInterrupt, Stopped)):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _unwinding(requests: list[int] | None = None) -> Iterator[None]:
    """Let a request to end (Ctrl-C, SIGTERM, SIGHUP) clean up like an error, with exit code 128 + its number.

    Args:
        requests: gets that number, because interrupted code may raise another error instead, as imports of numpy do.
    """

    def leave(number: int, _: object) -> None:
        if requests is not None:
            requests.append(number)
        for other in caught:  # a clean-up in progress finishes; Python complains where it finds SIG_IGN too late
            signal.signal(other, lambda *_: None)
        if number == signal.SIGINT and Verbosity.running:
            raise KeyboardInterrupt  # which a command may answer
        raise Stopped(128 + number)

    def once_more(lost: Any) -> None:
        """Raise it once more, a moment later, where Python drops it: in a callback of a weak reference, a `__del__`."""
        if not isinstance(lost.exc_value, (KeyboardInterrupt, Stopped)) or not hasattr(signal, "setitimer"):
            hook(lost)
            return
        ended = Stopped(lost.exc_value.code) if isinstance(lost.exc_value, Stopped) else KeyboardInterrupt()

        def end(*_: object) -> None:
            raise ended

        alarms.append(signal.signal(signal.SIGALRM, end))
        signal.setitimer(signal.ITIMER_REAL, _MOMENT)

    known = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    alarms: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, once_more
    # An ignored signal (nohup) stays ignored.
    before = {number: signal.getsignal(number) for number in known}
    caught = [n for n, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)]
    for number in caught:
        signal.signal(number, leave)
    try:
        supervise.release_signals()
        yield
    finally:
        supervise.end_undisturbed()
        sys.unraisablehook = hook
        for number in caught:
            signal.signal(number, before[number])
        if alarms:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarms[0] or signal.SIG_DFL)


def _known(error: Exception) -> LocalAttnError | None:
    """Return the error to show for an exception that ended a command; None for an unexpected one."""
    if isinstance(error, LocalAttnError):
        cause = error.__cause__
        if cause is None or error.exit_code == ExitCode.MISSING or not _NO_MEMORY.search(str(cause)):
            return error
        fix = "Check that the sizes are right; else free memory, or use a machine with more."
        return MissingDependency(error.what, why=f"There is not enough memory. {error.why}", fix=fix)
    if isinstance(error, ModuleNotFoundError):
        return missing_package(error)
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        what, why = "There is not enough memory.", first_line(error)[:300]
        fix = "Check that the sizes are right; else free memory, or use a machine with more."
    elif isinstance(error, OSError):
        what = f"The system reported an error: {error.strerror or error}."
        why = f"The file is {error.filename}." if error.filename is not None else ""
        fix = "Check permissions, free space, and the limits of this user."
    else:
        return None
    return MissingDependency(what, why=why, fix=fix).with_traceback(error.__traceback__)


if __name__ == "__main__":
    main()
