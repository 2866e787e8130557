"""Print what every command shows on the terminal: results, remarks, errors, the table of checks."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ...core import at_work
from ...core.documents.report import SIGNS, outcomes_text
from ...core.spelling import spelled, steerless
from ...reports import figures
from .flags import in_flags

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...core.documents.engine_sidecar import EngineSidecar
    from ...core.documents.report import Report
    from ...core.documents.sidecar import CheckRecord, Sidecar
    from ...core.errors import LocalAttnError
    from ...exporter.export_report import ExportReport
    from ...onnx_graph.summary import OnnxSummary


class Stopped(SystemExit):
    """The command was asked to end, by Ctrl-C or a signal; the code is 128 + the signal's number."""

    code: int


class Verbosity:
    """How much the command line prints; set by the options, read everywhere."""

    verbose = False
    quiet = False
    # Whether the options are read and a command is at work.
    running = False


def _set_verbose(value: int) -> int:
    Verbosity.verbose = Verbosity.verbose or value > 0
    if Verbosity.verbose:
        at_work.is_verbose()
    show_log(value)
    return value


def _set_quiet(value: bool) -> bool:
    Verbosity.quiet = Verbosity.quiet or value
    return value


VerboseOption = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        callback=_set_verbose,
        help="Show tracebacks and decisions; -vv: more details.",
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", callback=_set_quiet, help="Hide progress.")]
_MESSAGES = {"verbose": VerboseOption, "quiet": QuietOption}


def with_messages(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --verbose and --quiet to a command; their callbacks act before it runs."""

    @functools.wraps(command)
    def run(**options: Any) -> Any:
        Verbosity.running = True
        try:
            return command(**{name: value for name, value in options.items() if name not in _MESSAGES})
        except KeyboardInterrupt:  # Typer would make "Aborted." and exit code 1 of it
            raise Stopped(128 + signal.SIGINT) from None
        finally:
            Verbosity.running = False

    own = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
        for name, option in _MESSAGES.items()
    ]
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, **_MESSAGES}
    return run


def coloured(stream: TextIO) -> bool:
    """Return whether colours may be written: on a terminal, and neither NO_COLOR nor TERM=dumb is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(text: str) -> None:
    """Print one line of the result on stdout, with every character made visible."""
    print(spelled(text), flush=True)


def say_page(text: str) -> None:
    """Print a page or a document on stdout; its writer has already escaped texts from outside."""
    print(steerless(text.rstrip("\n")), flush=True)


def say_text(text: str, **style: Any) -> None:
    """Print a part of a text that a model or the user wrote, without a line end; style as of `typer.style`."""
    text = steerless(text) if sys.stdout.isatty() else text
    print(typer.style(text, **style) if style and coloured(sys.stdout) else text, end="", flush=True)


def say_outcome(sign: str, colour: str, text: str) -> None:
    """Print a line of the result that begins with a sign, such as a check's tick: no other line has one."""
    sign = typer.style(sign, fg=colour) if coloured(sys.stdout) else sign
    print(f"  {sign} {spelled(text)}".rstrip(), flush=True)


def note(text: str) -> None:
    """Print a remark about the work on stderr; nothing under -q."""
    if not Verbosity.quiet:
        _remark(text)


def print_notes(notes: Iterable[str]) -> None:
    """Print the notes of a report, on stderr."""
    for line in notes:
        note(f"Note: {in_flags(line)}")


def warn(text: str) -> None:
    """Print a warning on stderr, under -q too."""
    _remark(f"Warning: {text}", fg="yellow")


def _remark(text: str, **style: Any) -> None:
    text = spelled(text)
    print(typer.style(text, **style) if style and coloured(sys.stderr) else text, file=sys.stderr, flush=True)


# Beginning of foreign lines (tracebacks and output of libraries), which no line of ours has.
FOREIGN = "| "


def show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Show a warning of a library in one line, in place of `warnings.showwarning`."""
    _remark(f"{FOREIGN}{category.__name__}: {' '.join(str(message).split())[:_LONGEST_LINE]}")


class _OnStderr(logging.Handler):
    """Handler that writes each record as a line on the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            warn(record.getMessage())
        else:
            _remark(f"{record.name.removeprefix('localattn.')}: {record.getMessage()}")


def show_log(verbosity: int = 0) -> None:
    """Show what is logged under `localattn`: warnings always, decisions under -v, details under -vv.

    Args:
        verbosity: how often -v was given.
    """
    log = logging.getLogger("localattn")
    if not any(isinstance(handler, _OnStderr) for handler in log.handlers):
        log.addHandler(_OnStderr())
    log.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))


def print_json(document: Any) -> None:
    """Print the result as JSON and nothing else, on stdout."""
    say_page(json.dumps(document, indent=2, allow_nan=False))


def print_error(error: LocalAttnError) -> None:
    """Print what happened, why, and what to do: three lines on stderr; the traceback under -v."""
    _print_failure(error, *(in_flags(line) for line in (error.what, error.why, error.fix) if line))


def print_stopped(written: Sequence[str], left: Sequence[str] = ()) -> None:
    """Print that the command was stopped, and which files it left.

    Args:
        written: outputs that are in their places.
        left: temporary folders that cannot be removed.
    """
    _remark(
        f"Stopped; these files were already written: {', '.join(written)}."
        if written
        else "Stopped; nothing was written."
    )
    if left:
        _remark(f"These temporary folders cannot be removed: {', '.join(left)}.")


def print_fault(error: Exception) -> None:
    """Print an unexpected error in two lines on stderr; the traceback under -v."""
    advice = "This is a bug in localattn. Run again with -v and report what it prints."
    _print_failure(error, f"{type(error).__name__}: {first_line(error)}", advice)


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text; "" where it has none."""
    return (str(error).splitlines() or [""])[0]


def _print_failure(error: Exception, what: str, *lines: str) -> None:
    """Print the first line in red and the others below it; before them the traceback under -v."""
    if Verbosity.verbose:
        for line in "".join(traceback.format_exception(error)).splitlines():
            _remark(f"{FOREIGN}{line}")
    _remark(f"Error: {_cut(what)}", fg="red", bold=True)
    for line in lines:
        _remark(f"  {_cut(line)}")


# Most characters in a line of an error: enough to list the inputs of a model.
_LONGEST_LINE = 2000


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield the function to call as each stage begins: it shows the stage on stderr; nothing under -q."""
    from .terminal.progress import as_lines, on_terminal

    if Verbosity.quiet:
        yield lambda _: None
        return
    moves = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    with (on_terminal if moves else as_lines)() as step:
        yield lambda stage: step(spelled(stage))


def suggest(*words: object) -> None:
    """Print the command to type next, quoted for bash and zsh; only on a terminal, and not under -q."""
    if sys.stdout.isatty() and not Verbosity.quiet:
        say(f"Next: {' '.join(map(quoted, words))}")


def quoted(word: object) -> str:
    """Quote a word for a shell; zsh replaces `=name` at its beginning by the path of a program."""
    text = str(word)
    return f"'{text}'" if re.fullmatch(r"=[^']*", text) else shlex.quote(text)


_COLOURS = {"passed": "green", "failed": "red", "not proven": "yellow", "skipped": "yellow"}


def print_checks(checks: Sequence[CheckRecord]) -> None:
    """Print one line per check, and how many had each outcome."""
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        sign, colour = SIGNS[check.status], _COLOURS[check.status]
        outcome = "" if check.status == "passed" else f"{check.status.upper()}: "
        say_outcome(sign, colour, f"{check.name:<{width}}  {outcome}{check.detail}")
    if checks:
        say(f"  {outcomes_text(check.status for check in checks)}")


def print_signature(described: Sidecar | EngineSidecar | OnnxSummary) -> None:
    """Print the inputs and outputs of a file."""
    for kind, specs in (("input ", described.inputs), ("output", described.outputs)):
        for spec in specs:
            say(f"  {kind}  {spec.describe()}")


def print_exported(report: ExportReport, details: Sequence[str] = ()) -> None:
    """Print what an export wrote: notes, the file and its signature, details, the checks, warnings."""
    sidecar = report.sidecar
    print_notes(report.notes)
    size = report.path.stat().st_size
    if sidecar.external_data is not None:
        size += report.path.with_name(sidecar.external_data).stat().st_size
    say(f"{report.headline()}, {bytes_text(size)}")
    print_signature(sidecar)
    if sidecar.dynamic:
        say(f"  open    {', '.join(sidecar.dynamic)}; sequences up to {sidecar.seq_len}")
    for line in details:
        say(f"  {line}")
    if report.copied:
        say(f"  beside  {', '.join(path.name for path in report.copied)}")
    say("Checks:")
    print_checks(sidecar.checks)
    print_warnings(report)


def print_warnings(report: Report) -> None:
    """Print a report's warnings."""
    for line in report.warnings:
        warn(in_flags(line))


def export_document(report: ExportReport) -> dict[str, Any]:
    """Return the document that `--format json` prints for an export."""
    remarks = {"notes": [*map(in_flags, report.notes)], "warnings": [*map(in_flags, report.warnings)]}
    verdict = {"passed": report.passed, "outcomes": report.outcomes}
    return {"model": str(report.path), **verdict, **remarks, **report.sidecar.to_dict()}


def bytes_text(size: int) -> str:
    """Write a size for people: `14.8 MB`."""
    return figures.size(size)
