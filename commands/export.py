"""`localattn export`: from a checkpoint to a checked ONNX file."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.limits import LARGEST_SIZE
from ..core.storage.file_kinds import ONNX
from .parts.console import (
    Format,
    FormatOption,
    QuietOption,
    VerboseOption,
    finite,
    note,
    print_exported,
    print_json,
    progress,
    say,
)
from .parts.export_module import ModuleRequest, export_users_module, open_axes, print_module, refuse_options
from .parts.export_steps import Mode, export_step_files, print_step_files
from .parts.paths import INPUT, ForceOption, OutputPath

if TYPE_CHECKING:
    from ..exporter.export import ExportRequest


# Options that mean something only for a checkpoint of a known class, and only for the user's own module.
CHECKPOINT_ONLY = {
    "config",
    "seq_len",
    "batch",
    "heads",
    "dim_head",
    "mask",
    "attn_bias",
    "causal",
    "full_mask",
    "dtype",
    "mode",
    "chunk",
}
INT8 = "int8"
MODULE_ONLY = {"weights", "factory_args", "module_input", "load_inputs"}


class Dtype(str, Enum):
    """Element type of the exported file."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


def export(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Weights: .pt, .pth, .bin or .safetensors.", show_default=False), INPUT
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write. (Default: CHECKPOINT with .onnx, or _step.onnx.)"),
        OutputPath(ONNX),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration (JSON, TOML or YAML). (Default: found beside the checkpoint.)"),
        INPUT,
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(max=LARGEST_SIZE, help="Sequence length of the file. (Default: the model's max_seq_len.)"),
    ] = None,
    batch: Annotated[int, typer.Option(max=LARGEST_SIZE, help="Batch size of the file.")] = 1,
    heads: Annotated[int | None, typer.Option(max=LARGEST_SIZE, help="Heads, where the weights do not tell.")] = None,
    dim_head: Annotated[
        int | None, typer.Option(max=LARGEST_SIZE, help="Head size, where the weights do not tell.")
    ] = None,
    mask: Annotated[bool, typer.Option("--mask", help="Add the input mask: bool, True = keep.")] = False,
    attn_bias: Annotated[bool, typer.Option("--attn-bias", help="Add the input attn_bias [H, w, K].")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="AFTLocal: the model was run with a causal mask.")] = False,
    full_mask: Annotated[
        bool, typer.Option("--full-mask", help="AFTLocal: add the input full_mask [T, T]; costs O(T²) time.")
    ] = False,
    mode: Annotated[
        Mode,
        typer.Option(
            help="full: whole sequences. step: a token a call, with caches; and a file for prompts beside it. "
            "prefill: the file for prompts alone."
        ),
    ] = Mode.full,
    chunk: Annotated[
        int | None,
        typer.Option(max=LARGEST_SIZE, help="Tokens a call of the file for prompts; 1: none. (Default: 64 or fewer.)"),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Element type of the file.")] = Dtype.fp32,
    opset: Annotated[
        int, typer.Option(max=LARGEST_SIZE, help="ONNX opset, 18 to 24; TensorRT 10.3 reads up to 20.")
    ] = 20,
    no_function_body: Annotated[
        bool,
        typer.Option(
            "--no-function-body",
            help="Leave out the attention node's function; only a plugin can run the file then (TensorRT 10.3).",
        ),
    ] = False,
    atol: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Absolute tolerance of the parity check. (Default: by dtype.)"),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Relative tolerance of the parity check. (Default: by dtype.)"),
    ] = None,
    allow_quadratic: Annotated[
        bool, typer.Option("--allow-quadratic", help="Accept tensors that are square in the sequence length.")
    ] = False,
    dynamic: Annotated[
        str | None, typer.Option(help="Axes that stay open: batch,seq. (Default: none, static shapes.)")
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            max=LARGEST_SIZE, help="Longest sequence with --dynamic seq. (Default: the example's, or the model's.)"
        ),
    ] = None,
    factory: Annotated[
        str | None,
        typer.Option(help="A function that returns your own module: package.module:function or file.py:function."),
    ] = None,
    factory_args: Annotated[str | None, typer.Option(help="Its keyword arguments, a JSON object.")] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="With --factory its weights (default: those it is made with); of a checkpoint: int8, "
            "for linear layers in dynamic int8."
        ),
        INPUT,
    ] = None,
    module_input: Annotated[
        list[str] | None,
        typer.Option("--input", help="An input of the module, name:dtype:[sizes], as tokens:int64:[1,128]. Repeat."),
    ] = None,
    load_inputs: Annotated[Path | None, typer.Option(help="An .npz with the module's inputs instead."), INPUT] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Open a pickled module. DANGER: runs any code that is in the file."),
    ] = False,
    force: ForceOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be exported, and stop.")] = False,
    output_format: FormatOption = Format.console,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Export a checkpoint, or your own module (--factory), to an ONNX file and check it.

    The file is checked before it appears: ONNX's checker, onnxruntime, parity with an independent float64
    reference, a witness of its window, and an audit of its memory. A JSON sidecar beside it records everything.
    """
    axes, source = open_axes(dynamic), weights if checkpoint is None else checkpoint
    common: dict[str, Any] = {
        "dynamic": axes,
        "opset": opset,
        "function_body": not no_function_body,
        "overwrite": force,
        "allow_quadratic": allow_quadratic,
        "atol": atol,
        "rtol": rtol,
    }
    given = {name for name in context.params if _is_given(context, name)}
    if factory is not None or (allow_pickle and source is not None):
        refuse_options(given, CHECKPOINT_ONLY | ({"weights"} if checkpoint is not None else set()), "your own module")
        asked = ModuleRequest(factory, factory_args, source, module_input or [], load_inputs, allow_pickle, output)
        with progress() as step:
            step("Loading PyTorch")
            from ..exporter.user_module.export_module import ModuleOptions

            options = ModuleOptions(max_seq_len=max_seq_len, **common)
            written, outcome = export_users_module(asked, options, step, dry_run=dry_run)
        print_module(written, outcome, as_json=output_format is Format.json)
        return
    precision = None if weights is None else str(weights)
    refuse_options(
        given,
        MODULE_ONLY - ({"weights"} if precision == INT8 else set()),
        "a checkpoint alone: name the function that makes your module with --factory",
    )
    if max_seq_len is not None and (seq_len is not None or "seq" not in axes):
        raise typer.BadParameter("it goes with --dynamic seq, and without --seq-len", param_hint="--max-seq-len")
    if checkpoint is None:
        raise typer.BadParameter("give a checkpoint, or --factory", param_hint="CHECKPOINT")
    if chunk is not None and mode is Mode.full:
        raise typer.BadParameter("it goes with --mode step or prefill", param_hint="--chunk")
    suffix = ".onnx" if mode is Mode.full else f"_{mode.value}.onnx"
    with progress() as step:
        step("Loading PyTorch")
        from ..exporter.export import ExportRequest, export
        from ..exporter.models.family import ShapeRequest

        request = ExportRequest(
            checkpoint=checkpoint,
            output=output or checkpoint.with_name(checkpoint.stem + suffix),
            config=config,
            shapes=ShapeRequest(
                max_seq_len if seq_len is None else seq_len, batch, heads, dim_head, mask, attn_bias, causal, full_mask
            ),
            dtype=dtype.value,
            weights=precision,
            **common,
        )
        if mode is not Mode.full:
            from ..exporter.step_export import StepRequest

            steps = StepRequest(request, mode.value, chunk)
            files = export_step_files(steps, step, dry_run=dry_run)
        elif not dry_run:
            report = export(request, step)
    if mode is not Mode.full:
        print_step_files(steps, files, as_json=output_format is Format.json)
        return
    if dry_run:
        _print_plan(request)
        return
    if output_format is Format.json:
        print_json({"model": str(report.path), "notes": report.notes, **report.sidecar.to_dict()})
    else:
        print_exported(report.path, report.sidecar, report.notes)


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option is on the command line, rather than at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _print_plan(request: ExportRequest) -> None:
    from ..exporter.export import open_request
    from ..exporter.source.dynamic_axes import dynamic_specs

    opened, source = open_request(request)
    for line in opened.notes:
        note(f"Note: {line}")
    say(f"Would export {source.class_name} to {request.output} ({request.dtype}, opset {request.opset}):")
    for spec in dynamic_specs(source, request.dtype, request.dynamic):
        say(f"  input   {spec.describe()}")
    say(f"  output  {source.output_name}")
    say(f"  window  {source.describe_window()}, {source.depth} attention layer(s)")
