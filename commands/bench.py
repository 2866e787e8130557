"""Define `localattn bench`: measure models side by side, and the certainty of the differences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, get_args

import typer

from ..core.errors import UsageError
from ..core.limits import LARGEST_SIZE, LONGEST_SECONDS, MOST_ITERATIONS, MOST_ROUNDS
from .parts.console import progress, say, suggest, warn
from .parts.declared import from_fields
from .parts.options import EntryOption, FactoryArgsOption, FactoryOption, finite, seed_option, size_option
from .parts.paths import INPUT, ForceOption
from .parts.plugins.kernels_in_use import has_nodes, say_kernels
from .parts.plugins.options import PluginUse, library_hint, plugin_asked
from .parts.report_output import OutputOption, ReportFormat, ReportFormatOption, choose
from .parts.terminal.controls import print_table

if TYPE_CHECKING:
    from ..core.documents.bench_report import BenchReport
    from ..reports.table import Table

_T = TypeVar("_T")
# Options that are one value, for the command and in Python.
_AS_GIVEN = ("batch", "duration", "iterations", "warmup", "rounds", "cuda_graph", "profile", "top", "seed")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """How `localattn bench` measures."""

    seq_len: Annotated[
        str | None, typer.Option(help="Lengths to measure at (512,1024), for files with a dynamic axis.")
    ] = None
    batch: Annotated[int | None, size_option("Sequences per call, for files with a dynamic axis.", least=1)] = None
    duration: Annotated[
        float,
        typer.Option(
            min=0, max=LONGEST_SECONDS, callback=finite, help="Minimum seconds of timed calls for each candidate."
        ),
    ] = 3.0
    iterations: Annotated[
        int, typer.Option(min=1, max=MOST_ITERATIONS, help="Minimum timed calls for each candidate.")
    ] = 10
    warmup: Annotated[
        float,
        typer.Option(
            min=0, max=1e3 * LONGEST_SECONDS, callback=finite, help="Minimum milliseconds of untimed calls before."
        ),
    ] = 200.0
    rounds: Annotated[
        int, typer.Option(min=1, max=MOST_ROUNDS, help="Turns of each candidate; 6 or more for an interval.")
    ] = 12
    threads: Annotated[
        str | None, typer.Option(help="CPU threads for one operator (.onnx); a list (1,2) measures each.")
    ] = None
    provider: Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda or tensorrt; or a list.")] = "auto"
    plugin: Annotated[
        str | None,
        typer.Option(
            help="What computes the attention node: auto, or none for standard operators; a list (none,auto) "
            "measures each. (Default: auto, or the libraries named.)"
        ),
    ] = None
    plugin_library: Annotated[
        list[Path] | None,
        typer.Option(help="A library of compiled kernels to measure with, if you trust it; may be repeated."),
        INPUT,
    ] = None
    runtime: Annotated[str, typer.Option(help="What runs ONNX files: auto (onnxruntime) or openvino; or a list.")] = (
        "auto"
    )
    percentile: Annotated[str, typer.Option(help="Percentiles of the latency.")] = "50,90,99"
    cuda_graph: Annotated[bool, typer.Option("--cuda-graph", help="Replay a CUDA graph (cuda, tensorrt, engines).")] = (
        False
    )
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where the time goes, by module, operator and node (.onnx).")
    ] = False
    load_inputs: Annotated[Path | None, typer.Option(help="Inputs (.npz) instead of random ones."), INPUT] = None
    top: Annotated[int, size_option("Rows of each table of the profile.", least=1)] = 15
    seed: Annotated[int, seed_option("Seed of the random inputs and of the order of turns.")] = 0


@from_fields
def bench(
    *,
    model: Annotated[Path, typer.Argument(help="An exported model or an engine.", show_default=False), INPUT],
    against: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file to compare with it; may be repeated. Of your own module also the checkpoint: PyTorch's module "
            "is then one more candidate.",
            show_default=False,
        ),
        INPUT,
    ] = None,
    factory: FactoryOption = None,
    factory_args: FactoryArgsOption = None,
    entry: EntryOption = None,
    options: BenchOptions,
    output_format: ReportFormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
) -> None:
    """Measure latency, throughput, memory and load time of models side by side.

    Each candidate (model × runtime × provider × threads × plugin × length) has a process of its own, and they take
    turns in rounds, so that whatever else the machine does affects all alike. Differences have their 95 % interval, and
    figures that a busy machine has distorted have a warning. The exit code is 0, whichever is faster.
    """
    destination = choose(output_format, output, force)
    from ..runtime.backends import registry
    from .api.benching import bench as measure

    plugins = _plugins(options.plugin, options.plugin_library or [])
    settings = {
        "provider": _listed("--provider", options.provider, str),
        "threads": _listed("--threads", options.threads, _count) if options.threads else (None,),
        "plugin": plugins,
        "runtime": _listed("--runtime", options.runtime, str),
        "seq_len": _listed("--seq-len", options.seq_len, _count) if options.seq_len else (),
        "percentile": _listed("--percentile", options.percentile, float),
        "inputs": options.load_inputs,
        **{name: getattr(options, name) for name in _AS_GIVEN},
    }
    with progress() as step:
        report = measure(
            model,
            against or (),
            factory=factory,
            factory_args=factory_args,
            entry=entry,
            progress=step,
            **settings,
        )
    if destination.shows_console:
        _print(report)
    if destination.format != "console":
        destination.write(_written(report, destination.format))
    for line in report.warnings:
        warn(line)
    if destination.shows_console and len(plugins) == 1 and report.rows:
        # If several kinds were measured, the table names them.
        say_kernels(lambda: has_nodes(model), report.rows[0], plugins[0])
    backend = registry.of_file(model)
    if destination.shows_console and backend is not None and not backend.built:
        suggest("localattn", "bundle", model, "-o", model.with_suffix(".tar"))


def _listed(flag: str, text: str, read: Callable[[str], _T]) -> list[_T]:
    """Split a list at its commas and read its parts.

    Raises:
        UsageError: a part cannot be read.
    """
    values = []
    for part in text.split(","):
        try:
            if not part.strip():
                raise ValueError
            values.append(read(part.strip()))
        except ValueError:
            why = f"{part[:40]!r} is not allowed there."
            raise UsageError(f"{flag} {text[:80]} is not understood.", why=why) from None
    return values


def _plugins(uses: str | None, libraries: Sequence[Path]) -> tuple[str, ...]:
    """List the values of --plugin and the libraries to measure with; "auto" if nothing is given.

    Raises:
        UsageError: a value is unknown.
    """
    listed = [] if uses is None else _listed("--plugin", uses, str)
    for way in listed:
        if way not in get_args(PluginUse):
            raise UsageError(
                f"--plugin {way[:80]!r} is neither auto nor none.",
                fix=library_hint(way[:80]) or "Write auto, none, or none,auto.",
            )
    return (*listed, *(plugin_asked("auto", library) for library in libraries)) or ("auto",)


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= LARGEST_SIZE:
        raise ValueError
    return value


def _written(report: BenchReport, chosen: ReportFormat) -> str:
    if chosen == "json":
        return report.to_json()
    if chosen == "md":
        from ..reports.bench.tables import bench_markdown

        return bench_markdown(report)
    from ..reports.bench.page import bench_page

    return bench_page(report)


def _print(report: BenchReport) -> None:
    from ..reports.bench.tables import profile_tables, profile_text, summary_rows, tables

    for table in tables(report):
        if table.rows:
            _print_table(table)
    for profile in report.profiles:
        say(f"Profile of {profile.label}")
        say(profile_text(profile))
        for table in profile_tables(profile):
            _print_table(table)
    for name, value in summary_rows(report):
        say(f"{name}: {value}")


def _print_table(table: Table) -> None:
    # Piped output is not cut to some terminal's width.
    print_table(table, width=None if sys.stdout.isatty() else 160, overflow="fold")
    for line in table.notes:
        say(line)
    say("")
