"""Define `localattn.export` and `export_module`: from a checkpoint or a live module to a checked ONNX file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.storage.wrong_file import check_exists
from ...exporter.options import ExportOptions, ModuleOptions, common
from .called_with import OldNames, called_with
from .notebook import IN_NOTEBOOKS
from .packages import packages_named

if TYPE_CHECKING:
    from torch import nn

    from ...exporter.export_report import ExportReport
    from ...exporter.options import ExportRequest
    from ...exporter.user_module.opened_module import Inputs
    from ...exporter.user_module.origin import Origin

Progress = Callable[[str], None]
# Arguments of older releases → the argument and the value that replace them.
_OLD: OldNames = {
    "quick": ("checks", {True: "quick", False: "all"}),
    "max_seq_len": ("seq_len", None),
    "max_length": ("seq_len", None),
}


@dataclass(frozen=True)
class ExportArguments(ExportOptions):
    """The arguments of `localattn.export`.

    Args:
        checkpoint: weights: .pt, .pth, .ckpt, .bin or .safetensors, never unpickled; of some families a folder.
        output: the ONNX file; by default the checkpoint's name with .onnx, or _step.onnx, and of a folder of Hugging
            Face NAME-onnx/model.onnx in the current folder.
        progress: called with each step as it begins.
    """

    checkpoint: str | Path
    output: str | Path | None = None
    progress: Progress = field(default=IN_NOTEBOOKS, kw_only=True)


@called_with(ExportArguments, _OLD)
def export(given: ExportArguments) -> ExportReport:
    """Export a checkpoint of a supported class; the file appears only after it passed its checks.

    Raises:
        UsageError: an argument or a file cannot be used.
        ExportFailed: the graph could not be made.
        CheckFailed: a check found a fault; nothing was written.
        MissingDependency: a package is not installed, or memory is short.

    Examples:
        >>> localattn.export("model.pt", "model.onnx", golden="golden.npz", checks="quick").passed
        True
    """
    check_options(given.checkpoint, given)
    with packages_named():
        from ...exporter.export import export as run

        return run(export_request(given.checkpoint, given.output, given), given.progress)


def check_options(checkpoint: str | Path, options: ExportOptions) -> None:
    """Refuse a missing checkpoint, and options that do not go together, without importing PyTorch.

    Raises:
        UsageError: one of these.
    """
    options.check()
    check_exists(Path(checkpoint))


def export_request(checkpoint: str | Path, output: str | Path | None, options: ExportOptions) -> ExportRequest:
    """Return the request that the exporter takes, of options that `check_options` accepts."""
    checkpoint = Path(checkpoint)
    suffix = ".onnx" if options.mode == "full" else f"_{options.mode}.onnx"
    return options.request(checkpoint, _default_output(checkpoint, suffix) if output is None else Path(output))


def _default_output(checkpoint: Path, suffix: str) -> Path:
    """Return a name after the checkpoint's; for a model with a tokenizer one in a new folder of the current one."""
    from ...exporter.models.registry import find_folder

    if not checkpoint.is_dir():
        return checkpoint.with_name(Path(checkpoint.name.removesuffix(".index.json")).stem + suffix)
    form = find_folder(checkpoint)
    if form is not None and form.accompanying_files:
        return Path(f"{checkpoint.resolve().name}-onnx") / f"model{suffix}"
    return checkpoint.with_name(checkpoint.name + suffix)


@dataclass(frozen=True)
class ModuleArguments(ModuleOptions):
    """The arguments of `localattn.export_module`.

    Args:
        module: the module, which is not changed.
        inputs: arrays or tensors by argument name; or `name:dtype:[shape]` for each.
        output: the ONNX file.
        origin: where the module came from, for the sidecar.
        progress: called with each step as it begins.
    """

    module: nn.Module
    inputs: Inputs
    output: str | Path
    origin: Origin | None = field(default=None, kw_only=True)
    progress: Progress = field(default=IN_NOTEBOOKS, kw_only=True)


@called_with(ModuleArguments, _OLD)
def export_module(given: ModuleArguments) -> ExportReport:
    """Export a module of your own with supported layers, or a Hugging Face model; compare it with the untouched one.

    Raises:
        UsageError: the module or an argument cannot be used.
        ExportFailed: PyTorch's exporter gave up.
        CheckFailed: a check found a fault; nothing was written.

    Examples:
        >>> report = localattn.export_module(module, ["tokens:int64:[1,64]"], "own.onnx", checks="quick")
        >>> report.sidecar.inputs[0].shape
        (1, 64)
    """
    with packages_named():
        from ...exporter.jobs.module import export_module as run

    options = ModuleOptions(**{**common(ModuleOptions, given), "dynamic": tuple(given.dynamic)})
    return run(given.module, given.inputs, given.output, options, origin=given.origin, progress=given.progress)
