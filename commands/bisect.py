"""Define `localattn bisect`: find the first module that computes a wrong result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import UsageError
from ..core.storage.wrong_file import check_exists
from ..reports.figures import figure
from ..reports.table import Table, numbers, texts
from .parts.console import print_notes, progress, say
from .parts.options import EntryOption, FactoryArgsOption, FactoryOption, number_option, seed_option
from .parts.paths import INPUT, ForceOption
from .parts.plugins.options import PluginLibraryOption, plugin_asked
from .parts.report_output import OutputOption, ReportFormatOption, choose, show
from .parts.terminal.controls import print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..exporter.bisect.evidence import Measured
    from ..exporter.bisect.request import BisectReport


def bisect(
    model: Annotated[Path, typer.Argument(help="The exported model, or an engine of it.", show_default=False), INPUT],
    against: Annotated[
        Path | None, typer.Option(help="The checkpoint it was exported from.", show_default=False), INPUT
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration. (Default: the sidecar's, else the one in the checkpoint's folder.)"),
        INPUT,
    ] = None,
    entry: EntryOption = None,
    factory: FactoryOption = None,
    factory_args: FactoryArgsOption = None,
    seed: Annotated[int, seed_option("Seed of the random inputs.")] = 0,
    load_inputs: Annotated[
        Path | None, typer.Option(help="Compare on these inputs (.npz) instead of random ones."), INPUT
    ] = None,
    atol: Annotated[
        float | None,
        number_option("Absolute tolerance, in units of each value's root mean square. (Default: by dtype.)"),
    ] = None,
    rtol: Annotated[float | None, number_option("Relative tolerance. (Default: by dtype.)")] = None,
    provider: Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda or tensorrt.")] = "auto",
    plugin_library: PluginLibraryOption = None,
    all_boundaries: Annotated[
        bool, typer.Option("--all", help="Show every module boundary, not only those around the fault.")
    ] = False,
    output_format: ReportFormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
) -> None:
    """Name the first module whose output leaves the tolerance, and the likely cause.

    The file and a float64 run of the model are compared wherever a module begins or ends. Exit code 0 if all agree,
    1 if a module was found.
    """
    destination = choose(output_format, output, force)
    if against is None and factory is None:
        raise typer.BadParameter("give --against, or --factory", param_hint="--against")
    if against is not None:
        _check_checkpoint(model, against)
    with progress() as step:
        step("Loading PyTorch")
        from ..exporter.bisect.bisect import run_bisect
        from ..exporter.bisect.request import BisectRequest

        request = BisectRequest(
            model=model,
            checkpoint=against,
            config=config,
            seed=seed,
            inputs=load_inputs,
            atol=atol,
            rtol=rtol,
            provider=provider,
            plugin=plugin_asked("auto", plugin_library),
            entry=entry,
            factory=factory,
            factory_args=factory_args,
        )
        report = run_bisect(request, step)
    print_notes(report.notes)
    reference = ("--against", against) if against is not None else ("--factory", factory)
    document = {"model": str(model), "against": str(reference[1]), **report.to_dict()}
    page = () if report.fault is None else ("-o", model.with_suffix(".bisect.html"))
    following = ("localattn", "bisect" if page else "parity", model, *reference, *page)
    show(destination, "bisect", document, lambda: _print_report(model, report, all_boundaries), following)
    if report.fault is not None:
        raise typer.Exit(1)


def _check_checkpoint(model: Path, against: Path) -> None:
    """Refuse what holds no weights, before PyTorch is loaded.

    Raises:
        UsageError: it is not there, or an exported file.
    """
    from ..runtime.backends import registry

    if registry.of_file(against) is not None:
        raise UsageError(
            f"{against} is an exported file, and bisect needs the weights.",
            why="It runs the PyTorch model module by module.",
            fix=f"Give the checkpoint; or compare the two files: localattn parity {model} --against {against}",
        )
    if against.suffix.lower() == ".npz":
        raise UsageError(
            f"{against} holds arrays, and no weights.",
            why="bisect runs the PyTorch model module by module.",
            fix=f"Give the checkpoint; or compare with the arrays: localattn parity {model} --golden {against}",
        )
    check_exists(against)


def _print_report(model: Path, report: BisectReport, all_boundaries: bool) -> None:
    fault = report.fault
    if fault is None:
        largest = report.largest
        say(f"{model}: all {len(report.rows)} module boundaries agree with the float64 model.")
        say(
            f"The largest error is at {_label(largest)}: {largest.comparison.relative_rms:.2g} of its own size "
            f"(rms), {largest.comparison.max_abs:.2g} at most."
        )
        if all_boundaries:
            _print_rows(report.rows)
        return
    say(f"{model} first leaves the tolerance in: {fault.module or 'the model itself, between its modules'}")
    say(f"  likely cause  {fault.cause.name}")
    say(f"  evidence      {fault.cause.evidence}")
    rows = report.rows if all_boundaries else [*fault.before, fault.boundary]
    _print_rows(rows)


def _label(row: Measured) -> str:
    return f"{row.path or 'the model'} ({row.role})"


def _print_rows(rows: Sequence[Measured]) -> None:
    columns = (*texts("module", "what"), *numbers(*_FIGURES), *texts(""))
    cells = []
    for row in rows:
        figures = row.comparison.figures()
        verdict = "ok" if row.passed else "WRONG"
        cells.append((row.path or "(the model)", row.role, *(figure(figures[name]) for name in _FIGURES), verdict))
    print_table(Table("", columns, tuple(cells), marks=tuple("" if row.passed else "bad" for row in rows)))


_FIGURES = ("max_abs", "relative_rms", "not_finite")
