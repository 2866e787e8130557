"""Define `localattn export`: from a checkpoint to a checked ONNX file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from ..core.storage.file_kinds import ONNX
from ..core.versions import DEFAULT_OPSET, OPSETS
from .api.exporting import Mode, check_options, export_request
from .api.exporting import export as export_checkpoint
from .parts.console import export_document, print_exported, print_json, print_notes, progress, say, suggest, warn
from .parts.export_module import export_users_module, parse_axes, print_module, refuse_options
from .parts.export_steps import print_step_files, print_step_plan
from .parts.flags import in_flags
from .parts.options import ChecksOption, EntryOption, FormatOption, number_option, size_option
from .parts.paths import INPUT, ForceOption, OutputPath
from .parts.terminal.help import Hint
from .parts.terminal.panels import MODULE

if TYPE_CHECKING:
    from ..exporter.export import ExportReport, ExportRequest
    from ..exporter.step_export import StepRequest


# Options that apply only to a checkpoint of a known class, and options that apply only to the user's own module.
CHECKPOINT_ONLY = {
    *("config", "seq_len", "batch", "heads", "dim_head", "mask", "attn_bias", "causal", "full_mask", "position_ids"),
    *("dtype", "weight_dtype", "attention_dtype", "mode", "chunk", "max_length", "task"),
}
MODULE_ONLY = {"weights", "factory_args", "module_input", "load_inputs"}
# Options of both that are called as arguments of `localattn.export`.
BOTH = ("opset", "standard_ops", "golden", "allow_quadratic", "allow_wide_integers", "atol", "rtol", "max_seq_len")

# Element type of the file.
Dtype = Literal["fp32", "fp16", "bf16"]
# Element type of the weights of linear layers, where it differs from the file's.
WeightDtype = Literal["int8", "int4", "fp8", "int8-qdq"]
# What a Hugging Face model is for.
Task = Literal["feature-extraction", "fill-mask", "text-classification", "token-classification", "text-generation"]


def _weight_dtype_hint(text: str) -> str:
    """Return a hint for a type of the weights alone, which has an option of its own."""
    return f"For weights in {text}, use --weight-dtype {text}" if text in get_args(WeightDtype) else ""


def export(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="Weights: a .pt, .pth, .ckpt, .bin or .safetensors file, or a Hugging Face folder.", show_default=False
        ),
        INPUT,
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
    entry: EntryOption = None,
    golden: Annotated[
        Path | None,
        typer.Option(help="An .npz that localattn.record wrote from your own model: the file must match it."),
        INPUT,
    ] = None,
    task: Annotated[
        Task | None,
        typer.Option(help="What a Hugging Face folder is exported for. (Default: what it was saved for.)"),
    ] = None,
    seq_len: Annotated[
        int | None, size_option("Sequence length of the exported file. (Default: the model's max_seq_len.)")
    ] = None,
    batch: Annotated[int, size_option("Batch size of the exported file.")] = 1,
    heads: Annotated[int | None, size_option("Number of heads, if the weights do not show it.")] = None,
    dim_head: Annotated[int | None, size_option("Head size, if the weights do not show it.")] = None,
    mask: Annotated[bool, typer.Option("--mask", help="Add the input mask: bool, True = keep.")] = False,
    attn_bias: Annotated[bool, typer.Option("--attn-bias", help="Add the input attn_bias [H, w, K].")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="AFTLocal: the model was run with a causal mask.")] = False,
    full_mask: Annotated[
        bool, typer.Option("--full-mask", help="AFTLocal: add the input full_mask [T, T]; costs O(T²) time.")
    ] = False,
    position_ids: Annotated[
        bool,
        typer.Option(
            "--position-ids", help="Hugging Face: add the input position_ids; without it positions count from 0."
        ),
    ] = False,
    mode: Annotated[
        Mode,
        typer.Option(
            help="full: whole sequences. step: a token a call, with caches; and a file for prompts beside it. "
            "prefill: the file for prompts alone."
        ),
    ] = "full",
    chunk: Annotated[
        int | None, size_option("Tokens a call of the file for prompts; 1: none. (Default: 64 or fewer.)")
    ] = None,
    max_length: Annotated[
        int | None,
        size_option("Most positions of a step file of a Hugging Face model. (Default: 4096, or what it has.)"),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Element type of the file."), Hint(_weight_dtype_hint)] = "fp32",
    weight_dtype: Annotated[
        WeightDtype | None,
        typer.Option(
            help="int8: linear layers with dynamic int8 products. int4: their weights in 4 bits, in blocks of 32. "
            "fp8, int8-qdq: 8-bit products of TensorRT's engines. (Default: as --dtype.)"
        ),
    ] = None,
    attention_dtype: Annotated[
        Literal["fp8"] | None,
        typer.Option(
            help="fp8: attention that the plugin library computes in fp8, on GPUs from compute capability 8.9 on. "
            "(Default: as --dtype.)"
        ),
    ] = None,
    opset: Annotated[
        int, size_option(f"ONNX opset, {OPSETS[0]} to {OPSETS[-1]}; TensorRT 10.3 reads up to {DEFAULT_OPSET}.")
    ] = DEFAULT_OPSET,
    no_function_body: Annotated[
        bool,
        typer.Option(
            "--no-function-body",
            help="Leave out the attention node's function; only a plugin can run the file then (TensorRT 10.3).",
        ),
    ] = False,
    checks: ChecksOption = "all",
    standard_ops: Annotated[
        bool,
        typer.Option(
            "--standard-ops",
            help="Write standard operators alone, no functions: for runtimes other than onnxruntime and TensorRT.",
        ),
    ] = False,
    atol: Annotated[float | None, number_option("Absolute tolerance of the parity check. (Default: by dtype.)")] = None,
    rtol: Annotated[float | None, number_option("Relative tolerance of the parity check. (Default: by dtype.)")] = None,
    allow_quadratic: Annotated[
        bool, typer.Option("--allow-quadratic", help="Accept tensors whose size is the square of the sequence length.")
    ] = False,
    allow_wide_integers: Annotated[
        bool,
        typer.Option(
            "--allow-wide-integers",
            help="Accept integers that need more than 32 bits, which not every runtime supports.",
        ),
    ] = False,
    dynamic: Annotated[
        str | None,
        typer.Option(help="Dynamic axes: batch,seq; or none. (Default: those of the model's family, mostly none.)"),
    ] = None,
    max_seq_len: Annotated[
        int | None, size_option("Longest sequence with --dynamic seq. (Default: the example's, or the model's.)")
    ] = None,
    factory: Annotated[
        str | None,
        typer.Option(help="A function that returns your own module: package.module:function or file.py:function."),
    ] = None,
    factory_args: Annotated[
        str | None, typer.Option(help="The function's keyword arguments, as a JSON object.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="With --factory: the checkpoint with the weights. (Default: the weights that the function sets.)"
        ),
        INPUT,
    ] = None,
    module_input: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="An input of the module, name:dtype:[sizes], such as 'tokens:int64:[1,128]'. Repeat for more.",
        ),
    ] = None,
    load_inputs: Annotated[
        Path | None, typer.Option(help="An .npz with the module's inputs instead.", rich_help_panel=MODULE), INPUT
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Open a pickled module. DANGER: runs any code that is in the file."),
    ] = False,
    force: ForceOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be exported, and stop.")] = False,
    output_format: FormatOption = "console",
) -> None:
    """Export a checkpoint, or your own module (--factory), to an ONNX file and check it.

    The file is checked before it appears: ONNX's checker, onnxruntime, parity with an independent float64
    reference, a check of its window, and a check that memory grows linearly. A JSON sidecar records everything.
    What the weights do not show, such as the window, is proven against your own model with --golden.
    """
    values = dict(locals())  # before anything else has a name here
    if standard_ops and no_function_body:
        raise typer.BadParameter("it cannot be used with --no-function-body", param_hint="--standard-ops")
    axes, source = parse_axes(dynamic), weights if checkpoint is None else checkpoint
    common: dict[str, Any] = {name: values[name] for name in BOTH}
    common |= {"function_body": not no_function_body, "quick": checks == "quick", "overwrite": force}
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, found in sources.items() if found is not None and found.name == "COMMANDLINE"}
    if factory is not None or (allow_pickle and source is not None):
        refuse_options(given, CHECKPOINT_ONLY | ({"weights"} if checkpoint is not None else set()), "your own module")
        with progress() as step:
            step("Loading PyTorch")
            written, outcome = export_users_module(
                common | {"dynamic": axes},
                step,
                factory=factory,
                factory_args=factory_args,
                weights=source,
                module_input=module_input,
                load_inputs=load_inputs,
                allow_pickle=allow_pickle,
                entry=entry,
                output=output,
                dry_run=dry_run,
            )
        print_module(written, outcome, as_json=output_format == "json")
        if output_format != "json":
            suggest(*(["localattn", *_without_dry_run()] if dry_run else ["localattn", "run", written]))
        return
    if weights is not None and str(weights) in get_args(WeightDtype):
        raise typer.BadParameter(
            f"it needs a file; for weights in {weights}, use --weight-dtype {weights}", param_hint="--weights"
        )
    refuse_options(
        given, MODULE_ONLY, "a checkpoint is not enough: name the function that makes your module with --factory"
    )
    if checkpoint is None:
        raise typer.BadParameter("give a checkpoint, or --factory", param_hint="CHECKPOINT")
    options = {name: values[name] for name in (*CHECKPOINT_ONLY, "entry")} | common
    options["dynamic"] = None if dynamic is None else axes
    check_options(checkpoint, **options)
    with progress() as step:
        step("Loading PyTorch")
        if not dry_run:
            report = export_checkpoint(checkpoint, output, **options, progress=step)
    if dry_run:
        _print_plan(export_request(checkpoint, output, **options))
        suggest("localattn", *_without_dry_run())
        return
    if mode != "full":
        print_step_files(report, as_json=output_format == "json")
    elif output_format == "json":
        print_json(export_document(report))
    else:
        print_exported(report)
    if output_format != "json":
        suggest(*_next(report, checkpoint, config, quick=checks == "quick"))


def _without_dry_run() -> list[str]:
    """Return the command line without `--dry-run`, to run the export that was only tried."""
    return [word for word in sys.argv[1:] if word != "--dry-run"]


def _next(report: ExportReport, checkpoint: Path, config: Path | None, *, quick: bool) -> Sequence[object]:
    """Return the command to type after an export: use the file, or compare it more after quick checks."""
    step = report.sidecar.step
    if step is not None and step.mode == "step" and step.token_input in ("tokens", "input_ids"):
        return ("localattn", "generate", report.path, "--prompt-ids", "1,2,3")
    if quick:
        given = () if config is None else ("--config", config)
        return ("localattn", "parity", report.path, "--against", checkpoint, *given)
    return ("localattn", "run", report.path)


def _print_plan(request: ExportRequest | StepRequest) -> None:
    from ..exporter.export import ExportRequest, dynamic_axes, open_request
    from ..exporter.source.dynamic_axes import dynamic_specs

    if not isinstance(request, ExportRequest):
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
