"""The command line: one verb a file in `commands/`, put together here.

Errors end with the exit codes of `core.errors.ExitCode`. Nothing heavy is imported until a command runs, and of the
commands only the one that is asked for.
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

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from .commands import completion
from .commands.console import Verbosity, missing_package, print_error
from .commands.log_output import show_log
from .core import process
from .core.errors import ExitCode, LocalAttnError, MissingDependency

# Modules of `commands/`, in the order of the help. One of several verbs has an `app`, any other a function of its name.
COMMANDS = (
    *("export", "parity", "build", "run", "generate", "bench", "inspect"),
    *("plugin", "bundle", "bisect", "doctor", "demo"),
)

_EPILOG = (
    "Exit codes: 0 good, 1 a check failed, 2 wrong usage or input, 3 something is missing from this machine, "
    "4 the export failed, 5 a build failed."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"localattn {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def command_line(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands; only they are imported."""
    app = typer.Typer(
        name="localattn",
        help="Trained local-attention models as ONNX files that are proven equal and run anywhere.",
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
            app.add_typer(module.app)
        else:
            app.command()(getattr(module, name))
    return app


def main() -> None:
    """Run the command line and leave with its exit code."""
    completion.prepare(sys.argv)
    process.owned = True
    show_log()
    asked = tuple(sys.argv[1:2])
    try:
        command_line(asked if set(asked) & set(COMMANDS) else COMMANDS)()
    except LocalAttnError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            _leave_with_fault(error)
        else:
            print_error(missing)
            sys.exit(missing.exit_code)
    except MemoryError as error:
        print_error(_no_memory(error))
        sys.exit(ExitCode.MISSING)
    except BrokenPipeError:  # the reader of our output went away (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.OK)
    except Exception as error:
        _leave_with_fault(error)


def _no_memory(error: MemoryError) -> LocalAttnError:
    return MissingDependency(
        "There is not enough memory.",
        why=str(error).splitlines()[0][:300] if str(error) else "",
        fix="Check that the file is what it should be; else free memory, or use a machine with more.",
    )


def _leave_with_fault(error: Exception) -> None:
    """Report an error nobody expected."""
    if Verbosity.verbose:
        raise error
    typer.secho(f"Error: {type(error).__name__}: {error}".splitlines()[0], fg="red", bold=True, err=True)
    typer.echo("  This is a fault of localattn. Run again with -v and report what it prints.", err=True)
    sys.exit(ExitCode.INTERNAL)


if __name__ == "__main__":
    main()
