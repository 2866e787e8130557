"""What every command shares on the terminal: output formats, verbosity, errors, the table of checks."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .log_output import show_log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ...core.documents.sidecar import CheckRecord, Sidecar
    from ...core.errors import LocalAttnError


class Format(str, Enum):
    """How a result is printed."""

    console = "console"
    json = "json"


class Verbosity:
    """How much the command line says; set by the options, read everywhere."""

    verbose = False
    quiet = False


def _set_verbose(value: int) -> int:
    Verbosity.verbose = Verbosity.verbose or value > 0
    show_log(value)
    return value


def _set_quiet(value: bool) -> bool:
    Verbosity.quiet = Verbosity.quiet or value
    return value


def finite(value: float | None) -> float | None:
    """A callback for options that are numbers: NaN is in every range, and infinity in an open one."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


FormatOption = Annotated[Format, typer.Option("--format", help="console, or json: nothing but JSON on stdout.")]
VerboseOption = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, callback=_set_verbose, help="Show tracebacks and what is decided; -vv: details."
    ),
]
PluginOption = Annotated[
    str, typer.Option(help="Library of compiled kernels: auto (from your cache), none, or the path of one you trust.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", callback=_set_quiet, help="No progress.")]


def say(text: str, end: str = "\n") -> None:
    """A line of the result, on stdout."""
    print(text, end=end, flush=True)


def styled(text: str, **style: Any) -> str:
    """Text for `say`, in colour or bold where stdout is a terminal; arguments as of `typer.style`."""
    return typer.style(text, **style) if sys.stdout.isatty() else text


def note(text: str) -> None:
    """A line about the work, on stderr; nothing under -q."""
    if not Verbosity.quiet:
        _remark(text)


def warn(text: str) -> None:
    """A danger, on stderr, under -q too."""
    _remark(f"Warning: {text}", fg="yellow")


def _remark(text: str, **style: Any) -> None:
    print(typer.style(text, **style) if style and sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def print_json(document: Any) -> None:
    """The result as JSON and nothing else, on stdout."""
    say(json.dumps(document, indent=2, allow_nan=False))


def print_error(error: LocalAttnError) -> None:
    """What happened, why, and what to do: three lines on stderr; the traceback under -v."""
    if Verbosity.verbose:
        traceback.print_exception(error)
    _remark(f"Error: {_printable(error.what)}", fg="red", bold=True)
    for line in (error.why, error.fix):
        if line:
            _remark(f"  {_printable(line)}")


def print_fault(error: Exception) -> None:
    """An error nobody expected, in two lines on stderr; the traceback under -v."""
    if Verbosity.verbose:
        traceback.print_exception(error)
    first = (str(error).splitlines() or [""])[0]
    _remark(f"Error: {_printable(f'{type(error).__name__}: {first}')}", fg="red", bold=True)
    _remark("  This is a fault of localattn. Run again with -v and report what it prints.")


# Characters of an error's line: enough for the inputs of a model, and no flood.
_LONGEST_LINE = 2000


def _printable(text: str) -> str:
    """Text whose control characters are spelled out: a name in a file must not steer the terminal."""
    shown = text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in shown)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A spinner on stderr that names the step under way; plain silence where stderr is no terminal."""
    if Verbosity.quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("Starting") as status:
        yield lambda step: status.update(f"{step} …")


# What the extras of pyproject.toml bring, by import name.
_EXPORTER_PACKAGES = ("torch", "onnxscript", "onnx_ir", "einops", "safetensors", "yaml")


def missing_package(error: ModuleNotFoundError) -> LocalAttnError | None:
    """The error to show for a package that an extra would have brought; None for any other."""
    from ...core.errors import MissingDependency

    package = (error.name or "").split(".")[0]
    if package not in _EXPORTER_PACKAGES:
        return None
    return MissingDependency(
        f"{package} is not installed.",
        why="Reading checkpoints and exporting need it; running exported models does not.",
        fix="Install it with: pip install 'localattn[cpu]', or pip install 'localattn[gpu]'.",
    )


_SIGNS = {
    "passed": ("✓", "green"),
    "failed": ("✗", "red"),
    "not proven": ("?", "yellow"),
    "skipped": ("-", "yellow"),
}


def print_checks(checks: Sequence[CheckRecord]) -> None:
    """One line a check."""
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        sign, colour = _SIGNS[check.status]
        outcome = "" if check.status == "passed" else f"{check.status.upper()}: "
        say(f"  {styled(sign, fg=colour)} {check.name:<{width}}  {outcome}{check.detail}")


def print_exported(path: Path, sidecar: Sidecar, notes: Sequence[str], details: Sequence[str] = ()) -> None:
    """What an export wrote: notes, the file and its signature, details of the case, the checks."""
    for line in notes:
        note(f"Note: {line}")
    size = path.stat().st_size
    if sidecar.external_data is not None:
        size += path.with_name(sidecar.external_data).stat().st_size
    say(f"{path}  {sidecar.class_name}, {sidecar.dtype}, opset {sidecar.opset}, {bytes_text(size)}")
    for spec in sidecar.inputs:
        say(f"  input   {spec.describe()}")
    for spec in sidecar.outputs:
        say(f"  output  {spec.describe()}")
    if sidecar.dynamic:
        say(f"  open    {', '.join(sidecar.dynamic)}; sequences up to {sidecar.seq_len}")
    for line in details:
        say(f"  {line}")
    say("Checks:")
    print_checks(sidecar.checks)


def bytes_text(size: int) -> str:
    """A size a person reads: `14.8 MB`."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")
