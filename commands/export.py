"""`localattn export`: from a checkpoint to a checked ONNX file."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import (
    Format,
    FormatOption,
    QuietOption,
    VerboseOption,
    bytes_text,
    note,
    print_checks,
    print_json,
    progress,
    say,
)

if TYPE_CHECKING:
    from ..exporter.export import ExportReport, ExportRequest


class Dtype(str, Enum):
    """Element type of the exported file."""

    fp32 = "fp32"
    fp16 = "fp16"


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Weights: .pt, .pth, .bin or .safetensors.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write. (Default: CHECKPOINT with .onnx.)"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration (JSON, TOML or YAML). (Default: found beside the checkpoint.)"),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Sequence length of the file. (Default: the model's max_seq_len.)")
    ] = None,
    batch: Annotated[int, typer.Option(help="Batch size of the file.")] = 1,
    heads: Annotated[int | None, typer.Option(help="Heads, where the weights do not tell.")] = None,
    dim_head: Annotated[int | None, typer.Option(help="Head size, where the weights do not tell.")] = None,
    mask: Annotated[bool, typer.Option("--mask", help="Add the input mask: bool, True = keep.")] = False,
    attn_bias: Annotated[bool, typer.Option("--attn-bias", help="Add the input attn_bias [H, w, K].")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Element type of the file.")] = Dtype.fp32,
    opset: Annotated[int, typer.Option(help="ONNX opset, 18 to 24; TensorRT 10.3 reads up to 20.")] = 20,
    no_function_body: Annotated[
        bool,
        typer.Option(
            "--no-function-body",
            help="Leave out the attention node's function; only a plugin can run the file then (TensorRT 10.3).",
        ),
    ] = False,
    atol: Annotated[
        float | None, typer.Option(min=0, help="Absolute tolerance of the parity check. (Default: by dtype.)")
    ] = None,
    rtol: Annotated[
        float | None, typer.Option(min=0, help="Relative tolerance of the parity check. (Default: by dtype.)")
    ] = None,
    allow_quadratic: Annotated[
        bool, typer.Option("--allow-quadratic", help="Accept tensors that are square in the sequence length.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be exported, and stop.")] = False,
    output_format: FormatOption = Format.console,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Export a checkpoint to an ONNX file and check it.

    The file is checked before it appears: ONNX's checker, onnxruntime, parity with an independent float64
    reference, a witness of its window, and an audit of its memory. A JSON sidecar beside it records everything.
    """
    with progress() as step:
        step("Loading PyTorch")
        from ..exporter.export import ExportRequest, export
        from ..exporter.source import ShapeRequest

        request = ExportRequest(
            checkpoint=checkpoint,
            output=output or checkpoint.with_suffix(".onnx"),
            config=config,
            shapes=ShapeRequest(seq_len, batch, heads, dim_head, mask, attn_bias),
            dtype=dtype.value,
            opset=opset,
            function_body=not no_function_body,
            overwrite=force,
            allow_quadratic=allow_quadratic,
            atol=atol,
            rtol=rtol,
        )
        if not dry_run:
            report = export(request, step)
    if dry_run:
        _print_plan(request)
        return
    if output_format is Format.json:
        print_json({"model": str(report.path), "notes": report.notes, **report.sidecar.to_dict()})
    else:
        _print_report(report)


def _print_plan(request: ExportRequest) -> None:
    from ..exporter.export import open_request

    opened, source = open_request(request)
    for line in opened.notes:
        note(f"Note: {line}")
    say(f"Would export {source.class_name} to {request.output} ({request.dtype}, opset {request.opset}):")
    for spec in source.inputs(request.dtype):
        say(f"  input   {spec.describe()}")
    say(f"  output  {source.output_name}")
    say(f"  window  {source.geometry.describe()}, {source.depth} attention layer(s)")


def _print_report(report: ExportReport) -> None:
    sidecar = report.sidecar
    for line in report.notes:
        note(f"Note: {line}")
    size = report.path.stat().st_size
    if sidecar.external_data is not None:
        size += report.path.with_name(sidecar.external_data).stat().st_size
    say(f"{report.path}  {sidecar.class_name}, {sidecar.dtype}, opset {sidecar.opset}, {bytes_text(size)}")
    for spec in sidecar.inputs:
        say(f"  input   {spec.describe()}")
    for spec in sidecar.outputs:
        say(f"  output  {spec.describe()}")
    say("Checks:")
    print_checks(sidecar.checks)
