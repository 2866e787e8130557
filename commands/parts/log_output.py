"""Show log messages of the package on the command line: warnings always, decisions under -v, details under -vv."""

from __future__ import annotations

import logging

import typer

from .terminal.controls import harmless

LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class _OnStderr(logging.Handler):
    """Handler that writes each record as a line on the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        text = harmless(record.getMessage())
        if record.levelno >= logging.WARNING:
            typer.secho(f"Warning: {text}", fg="yellow", err=True)
        else:
            typer.echo(f"{record.name.removeprefix('localattn.')}: {text}", err=True)


def show_log(verbosity: int = 0) -> None:
    """Show what is logged under `localattn`.

    Args:
        verbosity: how often -v was given.
    """
    log = logging.getLogger("localattn")
    if not any(isinstance(handler, _OnStderr) for handler in log.handlers):
        log.addHandler(_OnStderr())
    log.setLevel(LEVELS[min(verbosity, len(LEVELS) - 1)])
