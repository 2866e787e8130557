"""Print what every command shows on the terminal: results, remarks, errors, the table of checks."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.documents.report import SIGNS, outcomes_text
from ...reports import figures
from .flags import in_flags
from .terminal.controls import harmless

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...core.documents.engine_facts import EngineFacts
    from ...core.documents.report import Report
    from ...core.documents.sidecar import CheckRecord, Sidecar
    from ...core.errors import LocalAttnError
    from ...exporter.export import ExportReport
    from ...onnx_graph.facts import OnnxFacts


class Verbosity:
    """How much the command line prints; set by the options, read everywhere."""

    verbose = False
    quiet = False


def _set_verbose(value: int) -> int:
    Verbosity.verbose = Verbosity.verbose or value > 0
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
        help="Show tracebacks and what is decided; -vv: details.",
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", callback=_set_quiet, help="No progress.")]
_MESSAGES = {"verbose": VerboseOption, "quiet": QuietOption}


def with_messages(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --verbose and --quiet to a command: what they ask for is done before it runs, by their callbacks."""

    @functools.wraps(command)
    def run(**options: Any) -> Any:
        return command(**{name: value for name, value in options.items() if name not in _MESSAGES})

    own = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
        for name, option in _MESSAGES.items()
    ]
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, **_MESSAGES}
    return run


def say(text: str, end: str = "\n") -> None:
    """Print a line of the result on stdout; control characters in it are shown as escapes."""
    print(harmless(text), end=end, flush=True)


def styled(text: str, **style: Any) -> str:
    """Style text for `say`, in colour or bold where stdout is a terminal; arguments as of `typer.style`."""
    return typer.style(text, **style) if sys.stdout.isatty() else text


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
    text = harmless(text)
    print(typer.style(text, **style) if style and sys.stderr.isatty() else text, file=sys.stderr, flush=True)


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
    say(json.dumps(document, indent=2, allow_nan=False))


def print_error(error: LocalAttnError) -> None:
    """Print what happened, why, and what to do: three lines on stderr; the traceback under -v."""
    _print_failure(error, *(in_flags(line) for line in (error.what, error.why, error.fix) if line))


def print_fault(error: Exception) -> None:
    """Print an unexpected error in two lines on stderr; the traceback under -v."""
    advice = "This is a fault of localattn. Run again with -v and report what it prints."
    _print_failure(error, f"{type(error).__name__}: {first_line(error)}", advice)


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text; "" where it has none."""
    return (str(error).splitlines() or [""])[0]


def _print_failure(error: Exception, what: str, *lines: str) -> None:
    """Print the first line in red and the others below it; before them the traceback under -v."""
    if Verbosity.verbose:
        traceback.print_exception(error)
    _remark(f"Error: {_printable(what)}", fg="red", bold=True)
    for line in lines:
        _remark(f"  {_printable(line)}")


# Most characters in a line of an error: enough to list the inputs of a model.
_LONGEST_LINE = 2000


def _printable(text: str) -> str:
    """Write control characters of a text as escapes: a name in a file must not control the terminal."""
    shown = text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in shown)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield the function to call as each stage begins: it shows the stage on stderr; nothing under -q."""
    from .terminal.progress import as_lines, on_terminal

    if Verbosity.quiet:
        yield lambda _: None
        return
    with (on_terminal if sys.stderr.isatty() else as_lines)() as step:
        yield step


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
        say(f"  {styled(sign, fg=colour)} {check.name:<{width}}  {outcome}{check.detail}")
    if checks:
        say(f"  {outcomes_text(check.status for check in checks)}")


def print_signature(facts: Sidecar | EngineFacts | OnnxFacts) -> None:
    """Print the inputs and outputs of a file."""
    for kind, specs in (("input ", facts.inputs), ("output", facts.outputs)):
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
    say("Checks:")
    print_checks(sidecar.checks)
    print_warnings(report)


def print_warnings(report: Report) -> None:
    """Print what a report does not prove."""
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
