"""Define `localattn.export` and `export_module`: from a checkpoint or a live module to a checked ONNX file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.wrong_file import check_exists
from ...core.versions import DEFAULT_OPSET
from .packages import packages_named
from .paths import as_path

if TYPE_CHECKING:
    from torch import nn

    from ...exporter.export import ExportReport, ExportRequest
    from ...exporter.step_export import StepRequest
    from ...exporter.user_module.export_module import Inputs, Origin

Progress = Callable[[str], None]
Mode = Literal["full", "step", "prefill"]


def export(
    checkpoint: str | Path,
    output: str | Path | None = None,
    *,
    config: str | Path | None = None,
    entry: str | None = None,
    golden: str | Path | None = None,
    mode: Mode = "full",
    chunk: int | None = None,
    seq_len: int | None = None,
    batch: int = 1,
    task: str | None = None,
    heads: int | None = None,
    dim_head: int | None = None,
    mask: bool = False,
    attn_bias: bool = False,
    causal: bool = False,
    full_mask: bool = False,
    position_ids: bool = False,
    dynamic: Sequence[str] | None = None,
    max_seq_len: int | None = None,
    dtype: str = "fp32",
    weight_dtype: str | None = None,
    attention_dtype: str | None = None,
    opset: int = DEFAULT_OPSET,
    function_body: bool = True,
    standard_ops: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    allow_quadratic: bool = False,
    allow_wide_integers: bool = False,
    quick: bool = False,
    overwrite: bool = False,
    max_length: int | None = None,
    progress: Progress = lambda _: None,
) -> ExportReport:
    """Export a checkpoint of a supported class; the file appears only after it passed its checks.

    Args:
        checkpoint: weights: .pt, .pth, .bin or .safetensors; never unpickled.
        output: the ONNX file; by default the checkpoint's name with .onnx, or _step.onnx, and model.onnx in a folder of
            Hugging Face.
        config: the configuration; by default the one beside the checkpoint.
        entry: which weights to read where the checkpoint holds several sets, "state_dict_ema" for example; by default
            the trained ones.
        golden: an .npz that `record` wrote, which proves the configuration.
        mode: "full" takes whole sequences, "step" a token a call, "prefill" chunks of a prompt.
        chunk: tokens a call of the file for prompts; by default 64 or fewer.
        seq_len: sequence length; by default the model's longest.
        batch: sequences a call.
        task: what a Hugging Face folder is exported for, `feature-extraction` for example; by default what it was
            saved for.
        heads: number of heads, where the weights do not show it.
        dim_head: head size, where the weights do not show it.
        mask: add the input `mask`, bool `[B, N]`, True = keep.
        attn_bias: add the input `attn_bias`, `[H, w, K]`.
        causal: for AFTLocal: the model was run with a causal mask.
        full_mask: for AFTLocal: add the input `full_mask`, bool `[T, T]`.
        position_ids: for Hugging Face models: add the input `position_ids`, `[B, N]`; else positions count from 0.
        dynamic: axes that stay dynamic, "batch" or "seq" or both; by default those of the model's family.
        max_seq_len: longest sequence where "seq" is dynamic.
        dtype: "fp32", "fp16" or "bf16".
        weight_dtype: "int8" for linear layers with dynamic int8 products, "int4" for their weights in blocks of 4 bits,
            "fp8" or "int8-qdq" for 8-bit products of TensorRT's engines.
        attention_dtype: "fp8" for attention that the plugin library computes in fp8.
        opset: ONNX opset, 18 to 24.
        function_body: carry the attention node's function; without it only a plugin runs the file.
        standard_ops: write standard operators alone, no functions, for other runtimes.
        atol: absolute tolerance; by default the element type's.
        rtol: relative tolerance; by default the element type's.
        allow_quadratic: accept tensors that are square in the sequence length.
        allow_wide_integers: accept integers beyond 32 bits, which some engines do not have.
        quick: compare on few inputs, and leave out the checks of the window and of memory.
        overwrite: replace an existing file.
        max_length: for step files of Hugging Face models: the most positions of a sequence; by default 4096, or as many
            as the model has.
        progress: called with each step as it begins.

    Raises:
        UsageError: an argument or a file cannot be used.
        ExportFailed: the graph could not be made.
        CheckFailed: a check found a fault; nothing was written.
        MissingDependency: a package is not installed, or memory is short.
    """
    options = dict(locals())  # before anything else has a name here
    del options["progress"]
    check_options(**options)
    with packages_named():
        from ...exporter.export import ExportRequest
        from ...exporter.export import export as run
        from ...exporter.step_export import export_steps

        request = export_request(**options)
        if isinstance(request, ExportRequest):
            return run(request, progress)
        report, *others = export_steps(request, progress)
        return replace(report, companion=others[0]) if others else report


def check_options(
    checkpoint: str | Path,
    *,
    mode: Mode,
    chunk: int | None,
    seq_len: int | None,
    max_seq_len: int | None,
    max_length: int | None,
    dynamic: Sequence[str] | None,
    position_ids: bool,
    attention_dtype: str | None,
    **_: Any,
) -> None:
    """Refuse a missing checkpoint, and arguments of `export` that do not go together, without importing PyTorch.

    Raises:
        UsageError: one of these.
    """
    if mode not in ("full", "step", "prefill"):
        raise UsageError(f"Unknown mode {mode!r}.", fix="Known: full, step, prefill.")
    if max_seq_len is not None and (seq_len is not None or "seq" not in (dynamic or ())):
        raise UsageError(
            f"{argument('max_seq_len')} needs {argument('dynamic', ('seq',))} and excludes {argument('seq_len')}."
        )
    if chunk is not None and mode == "full":
        raise UsageError(f"{argument('chunk')} needs {argument('mode', 'step')} or {argument('mode', 'prefill')}.")
    if max_length is not None and mode == "full":
        raise UsageError(
            f"{argument('max_length')} needs {argument('mode', 'step')}.",
            fix=f"For whole sequences: {argument('seq_len')}, or {argument('max_seq_len')}.",
        )
    for name, value, why in (
        ("position_ids", position_ids, "A step file counts positions itself."),
        ("attention_dtype", attention_dtype, "Step and prefill files have no fp8 kernels."),
    ):
        if mode != "full" and value not in (None, False):
            raise UsageError(f"{argument(name, value)} does not go with {argument('mode', mode)}.", why=why)
    if chunk is not None and chunk < 1:
        raise UsageError(f"{argument('chunk')} is {chunk}.", why="A call needs at least 1 token.")
    if max_length is not None and max_length < 1:
        raise UsageError(f"{argument('max_length')} is {max_length}.", why="A file needs at least 1 position.")
    check_exists(Path(checkpoint))


def export_request(
    checkpoint: str | Path,
    output: str | Path | None,
    *,
    config: str | Path | None,
    golden: str | Path | None,
    mode: Mode,
    chunk: int | None,
    dynamic: Sequence[str] | None,
    max_seq_len: int | None,
    weight_dtype: str | None,
    attention_dtype: str | None,
    **options: Any,
) -> ExportRequest | StepRequest:
    """Turn the arguments of `export`, which `check_options` accepts, into the request that the exporter takes."""
    from ...exporter.export import ExportRequest
    from ...exporter.models.family import ShapeRequest
    from ...exporter.step_export import StepRequest

    checkpoint = Path(checkpoint)
    suffix = ".onnx" if mode == "full" else f"_{mode}.onnx"
    shapes = {field.name: options.pop(field.name) for field in fields(ShapeRequest) if field.name in options}
    if shapes["seq_len"] is None:
        shapes["seq_len"] = max_seq_len
    request = ExportRequest(
        checkpoint=checkpoint,
        output=_default_output(checkpoint, suffix) if output is None else Path(output),
        config=as_path(config),
        golden=as_path(golden),
        shapes=ShapeRequest(**shapes),
        dynamic=None if dynamic is None else tuple(dynamic),
        weights=weight_dtype,
        attention=attention_dtype,
        **options,
    )
    return request if mode == "full" else StepRequest(request, mode, chunk)


def _default_output(checkpoint: Path, suffix: str) -> Path:
    """Return a name after the checkpoint's, or for a model with a tokenizer one in its folder."""
    from ...exporter.models.registry import find_folder

    if not checkpoint.is_dir():
        stem = (
            checkpoint.name.removesuffix(".index.json") if checkpoint.name.endswith(".index.json") else checkpoint.name
        )
        return checkpoint.with_name(Path(stem).stem + suffix)
    form = find_folder(checkpoint)
    if form is not None and form.companions:
        return checkpoint / f"model{suffix}"
    return checkpoint.with_name(checkpoint.name + suffix)


def export_module(
    module: nn.Module,
    inputs: Inputs,
    output: str | Path,
    *,
    golden: str | Path | None = None,
    dynamic: Sequence[str] = (),
    max_seq_len: int | None = None,
    opset: int = DEFAULT_OPSET,
    function_body: bool = True,
    standard_ops: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    allow_quadratic: bool = False,
    allow_wide_integers: bool = False,
    quick: bool = False,
    overwrite: bool = False,
    origin: Origin | None = None,
    progress: Progress = lambda _: None,
) -> ExportReport:
    """Export a module of your own with supported layers, or a Hugging Face model; compare it with the untouched one.

    Args:
        module: the module, which is not changed.
        inputs: arrays or tensors by argument name; or `name:dtype:[shape]` for each.
        output: the ONNX file.
        golden: an .npz that `record` wrote; the file is compared with the untouched module in any case.
        dynamic: names of the axes that stay dynamic.
        max_seq_len: longest sequence where that axis is dynamic; by default the example's.
        opset: ONNX opset, 18 to 24.
        function_body: carry the attention node's function; without it only a plugin runs the file.
        standard_ops: write standard operators alone, no functions, for other runtimes.
        atol: absolute tolerance; by default fp32's.
        rtol: relative tolerance; by default fp32's.
        allow_quadratic: accept tensors that are square in the sequence length.
        allow_wide_integers: accept integers beyond 32 bits, which some engines do not have.
        quick: compare on few inputs, and leave out the checks of the window and of memory.
        overwrite: replace an existing file.
        origin: where the module came from, for the sidecar.
        progress: called with each step as it begins.

    Raises:
        UsageError: the module or an argument cannot be used.
        ExportFailed: PyTorch's exporter gave up.
        CheckFailed: a check found a fault; nothing was written.
    """
    given = dict(locals()) | {"golden": as_path(golden), "dynamic": tuple(dynamic)}  # before others have names here
    with packages_named():
        from ...exporter.user_module.export_module import ModuleOptions
        from ...exporter.user_module.export_module import export_module as run

    options = ModuleOptions(**{field.name: given[field.name] for field in fields(ModuleOptions) if field.name in given})
    return run(module, inputs, output, options, origin=origin, progress=progress)
