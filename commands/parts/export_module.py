"""Run `localattn export --factory`: export the user's own module to a checked ONNX file."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import typer

from ...core.errors import UsageError
from ...exporter.options import ModuleOptions, WeightDtype, common, option
from .console import export_document, print_exported, print_json, say, warn
from .declared import refuse_flags
from .export_steps import print_step_files
from .terminal.panels import MODULE

if TYPE_CHECKING:
    from torch import nn

    from ...exporter.export_report import ExportReport
    from ...exporter.user_module.opened_module import Inputs
    from ...exporter.user_module.origin import Origin
    from ...exporter.user_module.replace import ReplacementReport


@dataclass(frozen=True, kw_only=True)
class ModuleSource:
    """Where a module of the user's own comes from, as the command `export` takes it."""

    factory: str | None = option(
        None, "A function that returns your own module: package.module:function or file.py:function.", MODULE
    )
    factory_args: str | None = option(None, "Its keyword arguments, a JSON object.", MODULE)
    weights: Path | None = option(
        None,
        "With --factory: the checkpoint of its weights. (Default: those that it is made with.)",
        MODULE,
        typed="file",
    )
    input: list[str] | None = option(
        None, "An input of the module, name:dtype:[sizes], as 'tokens:int64:[1,128]'. Repeat.", MODULE
    )
    load_inputs: Path | None = option(None, "An .npz with the module's inputs instead.", MODULE, typed="file")
    allow_pickle: bool = option(False, "Open a pickled module. DANGER: runs any code that is in the file.", MODULE)

    def is_module(self, checkpoint: Path | None) -> bool:
        """Return whether a module is exported: one that a function makes, or a pickled one."""
        return self.factory is not None or (self.allow_pickle and (checkpoint or self.weights) is not None)

    def with_weights(self, checkpoint: Path | None) -> ModuleSource:
        """Return it with its weights, which may be the command's argument."""
        return self if checkpoint is None else replace(self, weights=checkpoint)

    def refuse_without_factory(self, given: Collection[str]) -> None:
        """Refuse options that need a function.

        Raises:
            UsageError: one of them is given.
        """
        if self.weights is not None and str(self.weights) in get_args(WeightDtype):
            raise typer.BadParameter(
                f"it takes a file; for weights in {self.weights}: --weight-dtype {self.weights}",
                param_hint="--weights",
            )
        what = "a checkpoint alone: name the function that makes your module with --factory"
        refuse_flags(given, ModuleSource, {"factory", "allow_pickle"}, what)


def export_users_module(
    options: ModuleOptions,
    step: Callable[[str], None],
    source: ModuleSource,
    entry: str | None,
    output: Path | None,
    *,
    dry_run: bool,
) -> tuple[Path, ExportReport | ReplacementReport]:
    """Make the module and export it, or with `dry_run` only replace its layers.

    Return the path of the file, and the report.

    Args:
        options: how to export.
        step: called with each step as it begins.
        source: where the module comes from.
        entry: which weights to read where the checkpoint holds several sets; None chooses.
        output: the file to write; None for a name after the weights, or the function.
        dry_run: whether to stop before the export.
    """
    from ...exporter.jobs.module import plan_module
    from ...runtime.inputs.arrays import load_arrays
    from ..api.exporting import export_module

    if source.input and source.load_inputs is not None:
        raise UsageError("--input and --load-inputs are both given.", fix="Give one of them.")
    if not source.input and source.load_inputs is None:
        raise UsageError("The module's inputs are not given.", fix="Add --input name:dtype:[shape], or --load-inputs.")
    module, origin = _made(source, entry, step)
    inputs: Inputs = load_arrays(source.load_inputs) if source.load_inputs is not None else source.input or []
    if output is None:
        output = _named_after(source.weights, source.factory, options.mode)
    if dry_run:
        return output, plan_module(module, inputs, output, options, origin)
    chosen = common(ModuleOptions, options)
    return output, export_module(module, inputs, output, **chosen, origin=origin, progress=step)


def _made(source: ModuleSource, entry: str | None, step: Callable[[str], None]) -> tuple[nn.Module, Origin]:
    """Make the module; say what a pickle may do before it is opened."""
    from ...exporter.user_module.factory import module_from_factory, module_from_pickle

    weights = source.weights
    if source.allow_pickle and weights is not None:
        warn(
            f"--allow-pickle runs any code that {weights} contains: whoever wrote that file can do anything "
            "that you can on this machine"
        )
    step("Making the module")
    if source.factory is not None:
        return module_from_factory(
            source.factory, source.factory_args, weights, allow_pickle=source.allow_pickle, entry=entry
        )
    assert weights is not None
    return module_from_pickle(weights, entry)


def _named_after(weights: Path | None, factory: str | None, mode: str) -> Path:
    """Return the default output: in the weights' folder, else named after the function."""
    suffix = ".onnx" if mode == "full" else f"_{mode}.onnx"
    if weights is not None:
        return weights.with_name(weights.stem + suffix)
    return Path((factory or "model").rpartition(":")[2] + suffix)


def print_module(output: Path, outcome: ExportReport | ReplacementReport, *, as_json: bool) -> None:
    """Print the result of an export, or of a dry run."""
    from ...exporter.export_report import ExportReport
    from ...exporter.jobs.module import ModuleExportReport

    if isinstance(outcome, ExportReport):
        if outcome.sidecar.step is not None:
            print_step_files(outcome, as_json=as_json)
        elif as_json:
            print_json(export_document(outcome))
        else:
            details = _layers(outcome.replacement) if isinstance(outcome, ModuleExportReport) else ()
            print_exported(outcome, details)
        return
    say(f"Would export {type(outcome.module).__name__} to {output} (fp32):")
    for line in _layers(outcome):
        say(f"  {line}")


def _layers(replacement: ReplacementReport) -> list[str]:
    """Write a line for each upstream layer."""
    replaced = [f"replaced  {layer.describe()}" for layer in replacement.replaced]
    return replaced + [f"left      {layer.describe()}" for layer in replacement.left]
