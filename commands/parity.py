"""Define `localattn parity`: check that a file computes the same as its checkpoint or another file of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import UsageError
from ..core.limits import MOST_SEEDS, is_size
from ..core.storage.file_kinds import NPZ
from ..reports.figures import comparison_figure, figures_of
from ..reports.table import Table, numbers, texts
from .parts.console import print_checks, print_notes, progress, say, suggest, warn
from .parts.declared import from_fields
from .parts.flags import in_flags
from .parts.options import EntryOption, FactoryArgsOption, FactoryOption, RuntimeOption, number_option, seed_option
from .parts.paths import INPUT, ForceOption, OutputPath
from .parts.plugins.options import PluginLibraryOption, PluginOption, plugin_asked
from .parts.report_output import Destination, OutputOption, ReportFormatOption, choose, show
from .parts.terminal.controls import print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..runtime.parity.report import ParityReport


@dataclass(frozen=True, kw_only=True)
class ParityOptions:
    """What `localattn parity` compares, and how."""

    golden: Annotated[
        Path | None,
        typer.Option(help="An .npz that localattn.record wrote from your own model; with or without --against."),
        INPUT,
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            help="The checkpoint's configuration. (Default: the sidecar's, else the one in the checkpoint's folder.)"
        ),
        INPUT,
    ] = None
    entry: EntryOption = None
    factory: FactoryOption = None
    factory_args: FactoryArgsOption = None
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Number of sets of inputs at the largest size.")] = 3
    seed: Annotated[int, seed_option("The first seed.")] = 0
    atol: Annotated[float | None, number_option("Absolute tolerance. (Default: by dtype.)")] = None
    rtol: Annotated[float | None, number_option("Relative tolerance. (Default: by dtype.)")] = None
    load_inputs: Annotated[
        Path | None, typer.Option(help="Compare on these inputs (.npz) instead of text or random inputs."), INPUT
    ] = None
    save_inputs: Annotated[
        Path | None, typer.Option(help="Write the worst seed's inputs to this .npz."), OutputPath(NPZ)
    ] = None
    save_outputs: Annotated[
        Path | None,
        typer.Option(help="Write the worst seed's outputs to this .npz; NAME.reference is the reference's."),
        OutputPath(NPZ),
    ] = None
    seq_len: Annotated[
        str | None,
        typer.Option(help="Lengths to compare at (512,1024), for a dynamic axis. (Default: around the window.)"),
    ] = None
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--not-causal",
            help="AFTLocal: the model was exported with a causal mask; --not-causal: without. (Default: as the "
            "sidecar says.)",
        ),
    ] = None
    provider: Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda or tensorrt.")] = "auto"
    plugin: PluginOption = "auto"
    plugin_library: PluginLibraryOption = None
    runtime: RuntimeOption = "auto"


@from_fields
def parity(
    *,
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL...", help="Exported models, or engines of them.", show_default=False),
        INPUT,
    ],
    against: Annotated[
        Path | None,
        typer.Option(
            help="The checkpoint of the exported model; or another exported file, which needs no PyTorch.",
            show_default=False,
        ),
        INPUT,
    ] = None,
    options: ParityOptions,
    output_format: ReportFormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
) -> None:
    """Compare exported models and engines with an independent float64 reference of their checkpoint.

    The reference is plain dense mathematics on the checkpoint's weights, not the exported graph. Without PyTorch, as
    on a device, give the ONNX file instead of the checkpoint: onnxruntime runs it on the CPU, from its ONNX functions.
    That proves the files equal to this one, which its export has compared with the reference. With --golden the
    reference is your own model, as localattn.record recorded it. Exit code 0 if every output of every file is within
    the tolerance, 1 if not.
    """
    if len(models) > 1 and (options.save_inputs is not None or options.save_outputs is not None):
        raise UsageError(
            "--save-inputs and --save-outputs write the arrays of one file.",
            why=f"{len(models)} files are compared.",
            fix="Compare the files one at a time.",
        )
    destination = choose(output_format, output, force)
    arguments = _arguments(options)
    if against is None and options.golden is None and options.factory is None:
        raise typer.BadParameter("give --against, or --golden, or both", param_hint="--against")
    with progress() as step:
        from .api.comparing import parity as compare

        reports = [compare(model, against, **arguments, overwrite=force, progress=step) for model in models]
    passed = _show(destination, reports)
    if destination.shows_console:
        suggest(*_next(models[0], against, passed))
    if not passed:
        raise typer.Exit(1)


def _arguments(options: ParityOptions) -> dict[str, Any]:
    """Return the arguments of `localattn.parity` that are the same for every file."""
    return {
        "golden": options.golden,
        "config": options.config,
        "entry": options.entry,
        "factory": options.factory,
        "factory_args": options.factory_args,
        "seeds": range(options.seed, options.seed + options.seeds),
        "inputs": options.load_inputs,
        "seq_len": _lengths(options.seq_len),
        "causal": options.causal,
        "atol": options.atol,
        "rtol": options.rtol,
        "provider": options.provider,
        "plugin": plugin_asked(options.plugin, options.plugin_library),
        "runtime": options.runtime,
        "save_inputs": options.save_inputs,
        "save_outputs": options.save_outputs,
    }


def _show(destination: Destination, reports: list[ParityReport]) -> bool:
    """Show the reports, and return whether every file passed."""
    print_notes(dict.fromkeys(line for report in reports for line in report.notes))
    passed = all(report.passed for report in reports)
    files = [report.to_dict() for report in reports]
    document = files[0] if len(files) == 1 else {"passed": passed, "files": files}
    show(destination, "parity", document, lambda: _print_reports(reports))
    for line in dict.fromkeys(line for report in reports for line in report.warnings):
        warn(in_flags(line))
    return passed


def _next(model: Path, against: Path | None, passed: bool) -> Sequence[object]:
    """Return the command to type after a comparison: pack the file, or find the module that differs."""
    from ..runtime.backends import registry

    if not passed and against is not None and registry.of_file(against) is None:
        return ("localattn", "bisect", model, "--against", against)
    if not passed:
        return ("localattn", "inspect", model)
    backend = registry.of_file(model)
    if backend is not None and not backend.built:
        return ("localattn", "bundle", model, "-o", model.with_suffix(".tar"))
    return ("localattn", "bench", model)


def _lengths(text: str | None) -> tuple[int, ...]:
    """Read the numbers of a list with commas.

    Raises:
        UsageError: it is not such a list.
    """
    parts = [] if text is None else text.split(",")
    if not all(is_size(part.strip()) for part in parts):
        raise UsageError(
            f"--seq-len is {(text or '')[:80]!r}.", fix="Write lengths with commas between them: 512,1024."
        )
    return tuple(int(part) for part in parts)


def _print_reports(reports: list[ParityReport]) -> None:
    from ..runtime.parity.comparison import how_to_accept

    for report in reports:
        _print_table(report.rows())
        verdict = report.verdict
        how = " (compiled kernel)" if report.plugin else ""
        judge = f" ({report.reference.provider}, {report.reference.backend})" if report.reference.provider else ""
        say(f"{report.model}{how} and {report.against}{judge} are {verdict} within {report.tolerance.describe()}.")
        for side in report.compared_windows:
            say(f"  window of {side['whose']:<13}  {'; '.join(side['windows']) or 'not given'}")
        for line in report.against_baseline():
            say(f"{line}.")
        print_checks(report.checks)
        if not report.passed:
            failed = [row for row in report.rows() if not row["passed"]]
            say(in_flags(how_to_accept(failed, report.tolerance)))
    for line in dict.fromkeys(report.reference.checked for report in reports if report.reference.checked):
        say(f"{line}.")


def _print_table(rows: list[dict[str, Any]]) -> None:
    figures = figures_of(rows, _FIGURES)
    columns = (*texts("output", "inputs"), *numbers(*figures), *texts(""))
    cells = []
    for row in rows:
        verdict = "ok" if row["passed"] else "FAILED"
        cells.append((row["output"], row["inputs"], *(comparison_figure(row, name) for name in figures), verdict))
    print_table(Table("", columns, tuple(cells), marks=tuple("" if row["passed"] else "bad" for row in rows)))


_FIGURES = (
    *("max_abs", "max_rel", "rms", "cosine", "divergence", "agreement", "pooled_cosine"),
    *("not_finite", "expected_not_finite"),
)
