"""Define `localattn export`: from a checkpoint to a checked ONNX file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import UsageError
from ..core.storage.file_kinds import ONNX
from ..exporter.options import ExportOptions, ModuleOptions, common
from .api.exporting import check_options, export_request
from .api.exporting import export as export_checkpoint
from .parts.console import export_document, print_exported, print_json, print_notes, progress, say, suggest, warn
from .parts.declared import flag_names, from_fields, refuse_flags
from .parts.export_module import ModuleSource, export_users_module, print_module
from .parts.export_steps import print_step_files, print_step_plan
from .parts.flags import in_flags
from .parts.options import FormatOption
from .parts.paths import INPUT, OutputPath

if TYPE_CHECKING:
    from ..exporter.export_report import ExportReport
    from ..exporter.options import ExportRequest
    from ..exporter.user_module.replace import ReplacementReport


# Options of checkpoints that are a part of a module's inputs, and what to write instead.
_AS_INPUTS = {
    "mask": "Name it where forward takes it: --input 'mask:bool:[1,N]'",
    "batch": "Write the size into the input: --input 'x:float32:[batch=4,seq=128,64]'",
}
# Options of checkpoints that modules of the user's own take too: `entry` says which weights of `--weights` are read.
_OF_BOTH = {*flag_names(ModuleOptions), "entry"}


@from_fields
def export(
    context: typer.Context,
    *,
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="Weights: a .pt, .pth, .ckpt, .bin or .safetensors file, or a Hugging Face folder.", show_default=False
        ),
        INPUT,
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The file, or a folder for model.onnx. (Default: CHECKPOINT with .onnx, or _step.onnx; of a folder "
            "NAME-onnx/model.onnx here.)",
        ),
        OutputPath(ONNX),
    ] = None,
    options: ExportOptions,
    source: ModuleSource,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be exported, and stop.")] = False,
    output_format: FormatOption = "console",
) -> None:
    """Export a checkpoint, or your own module (--factory), to an ONNX file and check it.

    The file is checked before it appears: ONNX's checker, onnxruntime, parity with an independent float64
    reference, a check of its window, and a check that memory grows linearly. A JSON sidecar records everything.
    What the weights do not show, such as the window, is proven against your own model with --golden.
    """
    names = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, found in names.items() if found is not None and found.name == "COMMANDLINE"}
    as_json = output_format == "json"
    if source.is_module(checkpoint):
        for name, instead in _AS_INPUTS.items():
            if name in given:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{flag} does not apply to your own module.",
                    why="Its inputs are those of its forward, as you name them.",
                    fix=f"{instead}, and leave {flag} out.",
                )
        refuse_flags(given, ExportOptions, _OF_BOTH, "your own module")
        if checkpoint is not None:
            refuse_flags(given & {"weights"}, ModuleSource, (), "your own module")
        _export_module(checkpoint, output, options, source, dry_run=dry_run, as_json=as_json)
        return
    source.refuse_without_factory(given)
    if checkpoint is None:
        raise typer.BadParameter("give a checkpoint, or --factory", param_hint="CHECKPOINT")
    check_options(checkpoint, options)
    if dry_run:
        with progress() as step:
            step("Loading PyTorch")
            request = export_request(checkpoint, output, options)
        _print_plan(request)
        suggest("localattn", *_without_dry_run())
        return
    with progress() as step:
        step("Loading PyTorch")
        report = export_checkpoint(checkpoint, output, **common(ExportOptions, options), progress=step)
    _print(report, options, as_json=as_json)
    if not as_json:
        suggest(*_next(report, checkpoint, options))


def _export_module(
    checkpoint: Path | None,
    output: Path | None,
    options: ExportOptions,
    source: ModuleSource,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Export the user's own module, or say what would be exported."""
    source = source.with_weights(checkpoint)
    chosen = ModuleOptions(**{**common(ModuleOptions, options), "dynamic": options.dynamic or ()})
    with progress() as step:
        step("Loading PyTorch")
        written, outcome = export_users_module(chosen, step, source, options.entry, output, dry_run=dry_run)
    print_module(written, outcome, as_json=as_json)
    if not as_json:
        suggest(*(["localattn", *_without_dry_run()] if dry_run else _after_module(written, outcome)))


def _print(report: ExportReport, options: ExportOptions, *, as_json: bool) -> None:
    if options.mode != "full":
        print_step_files(report, as_json=as_json)
    elif as_json:
        print_json(export_document(report))
    else:
        print_exported(report)


def _without_dry_run() -> list[str]:
    """Return the command line without `--dry-run`, to run the export that was only tried."""
    return [word for word in sys.argv[1:] if word != "--dry-run"]


def _after_module(written: Path, outcome: ExportReport | ReplacementReport) -> Sequence[object]:
    """Return the command to type after the export of a module: text where its outputs are logits of its tokens."""
    from ..exporter.export_report import ExportReport

    sidecar = outcome.sidecar if isinstance(outcome, ExportReport) else None
    if sidecar is not None and sidecar.step is not None and sidecar.step.mode == "step":
        tokens = sidecar.token_limits.get(sidecar.step.token_input)
        if tokens is not None and sidecar.outputs[0].shape[-1] == tokens:
            return ("localattn", "generate", written, "--prompt-ids", "1,2,3")
    return ("localattn", "run", written)


def _next(report: ExportReport, checkpoint: Path, options: ExportOptions) -> Sequence[object]:
    """Return the command to type after an export: use the file, or compare it more after quick checks."""
    step = report.sidecar.step
    if step is not None and step.mode == "step" and step.token_input in ("tokens", "input_ids"):
        text = report.path.with_name("tokenizer.json").is_file()
        return ("localattn", "generate", report.path, *(("--prompt", "Hello") if text else ("--prompt-ids", "1,2,3")))
    if options.quick:
        given = () if options.config is None else ("--config", options.config)
        return ("localattn", "parity", report.path, "--against", checkpoint, *given)
    return ("localattn", "run", report.path)


def _print_plan(request: ExportRequest) -> None:
    from ..core.storage.outputs import check_outputs
    from ..exporter.jobs.checkpoint import CheckpointJob, dynamic_axes, open_request
    from ..exporter.jobs.steps import StepsJob
    from ..exporter.source.dynamic_axes import dynamic_specs

    job = CheckpointJob(request) if request.mode == "full" else StepsJob(request)
    check_outputs(job.outputs(), inputs=job.inputs(), overwrite=request.overwrite)
    if request.mode != "full":
        print_step_plan(request)
        return
    opened, source = open_request(request)
    axes = dynamic_axes(request, source)
    print_notes(opened.notes)
    for line in opened.warnings:
        warn(in_flags(line))
    say(f"Would export {source.title} to {request.output} ({request.dtype}, opset {request.opset}):")
    for spec in dynamic_specs(source, request.dtype, axes):
        say(f"  input   {spec.describe()}")
    say(f"  output  {', '.join(source.outputs)}")
    say(f"  window  {source.describe_window()}, {source.depth} attention layer(s)")
