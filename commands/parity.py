"""`localattn parity`: does a file compute what its checkpoint does, or another file of it?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.limits import LARGEST_SEED, MOST_SEEDS, is_size
from ..core.storage.file_kinds import NPZ
from .parts.console import PluginOption, QuietOption, VerboseOption, finite, missing_package, note, progress, say
from .parts.paths import INPUT, ForceOption, OutputPath
from .parts.report_output import OutputOption, ReportFormatOption, choose, show

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime.parity.report import ParityReport, ParityRequest

    Progress = Callable[[str], None]


def parity(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL...", help="The exported model, engines of it, or several.", show_default=False),
        INPUT,
    ],
    against: Annotated[
        Path,
        typer.Option(
            help="The checkpoint it was exported from; or another exported file, which needs no PyTorch.",
            show_default=False,
        ),
        INPUT,
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="The checkpoint's configuration. (Default: the sidecar's, else the one beside it.)"),
        INPUT,
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="How many sets of random inputs.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="The first seed.")] = 0,
    atol: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="Absolute tolerance. (Default: by dtype.)")
    ] = None,
    rtol: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="Relative tolerance. (Default: by dtype.)")
    ] = None,
    load_inputs: Annotated[
        Path | None, typer.Option(help="Compare on these inputs (.npz) instead of random ones."), INPUT
    ] = None,
    save_inputs: Annotated[
        Path | None, typer.Option(help="Write the worst seed's inputs to this .npz."), OutputPath(NPZ)
    ] = None,
    save_outputs: Annotated[
        Path | None,
        typer.Option(help="Write the worst seed's outputs to this .npz; NAME.reference is the reference's."),
        OutputPath(NPZ),
    ] = None,
    seq_len: Annotated[
        str | None,
        typer.Option(help="Lengths to compare at (512,1024), for an open axis. (Default: around the window.)"),
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--not-causal", help="AFTLocal: how it was exported. (Default: the sidecar's word.)"),
    ] = None,
    provider: Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda or tensorrt.")] = "auto",
    plugin: PluginOption = "auto",
    output_format: ReportFormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare exported models and engines with an independent float64 reference of their checkpoint.

    The reference is plain dense mathematics on the checkpoint's weights, not the exported graph. Without PyTorch, as
    on a device, give the ONNX file instead of the checkpoint: it is run by onnxruntime on the CPU, from its function
    bodies. That proves the files equal to this one, which its export has compared with the reference. Exit code 0
    if every output of every file is within the tolerance, 1 if not.
    """
    _refuse_shared_files(models, save_inputs, save_outputs)
    destination = choose(output_format, output, force)
    lengths = _lengths(seq_len)
    with progress() as step:
        compare = _judge(against, step)
        from ..runtime.parity.report import ParityRequest

        reports = []
        for model in models:
            request = ParityRequest(
                model=model,
                against=against,
                config=config,
                seeds=tuple(range(seed, seed + seeds)),
                inputs=load_inputs,
                lengths=lengths,
                atol=atol,
                rtol=rtol,
                provider=provider,
                plugin=plugin,
                causal=causal,
                keep_reference=save_outputs is not None,
            )
            reports.append(compare(request, step))
            reports[-1].save(save_inputs, save_outputs, overwrite=force)
    for line in dict.fromkeys(line for report in reports for line in report.notes):
        note(f"Note: {line}")
    passed = all(report.passed for report in reports)
    files = [report.to_dict() for report in reports]
    document = files[0] if len(files) == 1 else {"passed": passed, "files": files}
    show(destination, "parity", document, lambda: _print_reports(reports))
    if not passed:
        raise typer.Exit(1)


def _judge(against: Path, step: Progress) -> Callable[[ParityRequest, Progress], ParityReport]:
    """The comparison with such a file: what a backend runs is an exported one, all else a checkpoint.

    Raises:
        MissingDependency: it is a checkpoint, and PyTorch is not installed.
    """
    from ..core.errors import MissingDependency
    from ..runtime.session import BACKENDS

    if against.suffix.lower() in BACKENDS:
        from ..runtime.parity.files import run_file_parity

        return run_file_parity
    step("Loading PyTorch")
    try:
        from ..exporter.parity import run_parity
    except ModuleNotFoundError as error:
        lacking = missing_package(error)
        if lacking is None:
            raise
        fix = f"{lacking.fix} Or compare with an exported file, which needs no PyTorch: --against model.onnx."
        raise MissingDependency(lacking.what, why=lacking.why, fix=fix) from error
    return run_parity


def _lengths(text: str | None) -> tuple[int, ...]:
    """The numbers of a list with commas.

    Raises:
        UsageError: it is none.
    """
    from ..core.errors import UsageError

    parts = [] if text is None else text.split(",")
    if not all(is_size(part.strip()) for part in parts):
        raise UsageError(
            f"--seq-len is {(text or '')[:80]!r}.", fix="Write lengths with commas between them: 512,1024."
        )
    return tuple(int(part) for part in parts)


def _refuse_shared_files(models: list[Path], save_inputs: Path | None, save_outputs: Path | None) -> None:
    from ..core.errors import UsageError

    if len(models) > 1 and (save_inputs is not None or save_outputs is not None):
        raise UsageError(
            "--save-inputs and --save-outputs take the arrays of one file.",
            why=f"{len(models)} files are compared.",
            fix="Compare them one after another.",
        )


def _print_reports(reports: list[ParityReport]) -> None:
    for report in reports:
        tolerance = report.tolerance
        _print_table(report.rows())
        floor = "" if tolerance.cosine is None else f", cosine at least {tolerance.cosine}"
        verdict = "equal" if report.passed else "NOT equal"
        within = f"{tolerance.atol:g} + {tolerance.rtol:g}·|x|{floor}"
        how = " (compiled kernel)" if report.plugin else ""
        judge = f" ({report.reference.provider}, {report.reference.backend})" if report.reference.provider else ""
        say(f"{report.model}{how} and {report.against}{judge} are {verdict} within {within}.")
    for line in dict.fromkeys(report.reference.checked for report in reports if report.reference.checked):
        say(f"{line}.")


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("output", "left"),
        ("inputs", "left"),
        *((x, "right") for x in _FIGURES),
        ("", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        figures = [f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in _FIGURES]
        table.add_row(row["output"], row["inputs"], *figures, "ok" if row["passed"] else "[red]FAILED[/red]")
    Console(width=120).print(table)


_FIGURES = ("max_abs", "max_rel", "rms", "cosine", "not_finite")
