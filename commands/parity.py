"""`localattn parity`: does a file compute what its checkpoint does?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .console import Format, FormatOption, QuietOption, VerboseOption, note, print_json, progress, say


def parity(
    model: Annotated[Path, typer.Argument(help="The exported model.", show_default=False)],
    against: Annotated[Path, typer.Option(help="The checkpoint it was exported from.", show_default=False)],
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration. (Default: the sidecar's, else the one beside the checkpoint.)"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many sets of random inputs.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    atol: Annotated[float | None, typer.Option(min=0, help="Absolute tolerance. (Default: by dtype.)")] = None,
    rtol: Annotated[float | None, typer.Option(min=0, help="Relative tolerance. (Default: by dtype.)")] = None,
    load_inputs: Annotated[
        Path | None, typer.Option(help="Compare on these inputs (.npz) instead of random ones.")
    ] = None,
    save_inputs: Annotated[Path | None, typer.Option(help="Write the worst seed's inputs to this .npz.")] = None,
    save_outputs: Annotated[
        Path | None,
        typer.Option(help="Write the worst seed's outputs to this .npz; NAME.reference is the float64 one."),
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--not-causal", help="AFTLocal: how it was exported. (Default: the sidecar's word.)"),
    ] = None,
    provider: Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda or tensorrt.")] = "auto",
    output_format: FormatOption = Format.console,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare an exported model with an independent float64 reference of its checkpoint.

    The reference is plain dense mathematics on the checkpoint's weights, not the exported graph. Exit code 0 if
    every output is within the tolerance, 1 if not.
    """
    with progress() as step:
        step("Loading PyTorch")
        from ..core.tolerance import tolerance_for
        from ..exporter.parity import ParityRequest, run_parity

        request = ParityRequest(
            model=model,
            checkpoint=against,
            config=config,
            seeds=tuple(range(seed, seed + seeds)),
            inputs=load_inputs,
            atol=atol,
            rtol=rtol,
            provider=provider,
            causal=causal,
            keep_reference=save_outputs is not None,
        )
        report = run_parity(request, step)
        report.save(save_inputs, save_outputs)
    for line in report.notes:
        note(f"Note: {line}")
    if output_format is Format.json:
        print_json(report.to_dict())
    else:
        tolerance = tolerance_for(report.dtype, atol, rtol)
        _print_table(report.rows())
        floor = "" if tolerance.cosine is None else f", cosine at least {tolerance.cosine}"
        verdict = "equal" if report.passed else "NOT equal"
        say(f"{model} and {against} are {verdict} within {tolerance.atol:g} + {tolerance.rtol:g}·|x|{floor}.")
    if not report.passed:
        raise typer.Exit(1)


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
