"""Run `localattn export --factory`: export the user's own module to a checked ONNX file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import UsageError
from .console import export_document, print_exported, print_json, say, warn

if TYPE_CHECKING:
    from ...exporter.export import ExportReport
    from ...exporter.user_module.export_module import Inputs
    from ...exporter.user_module.replace import ReplacementReport


def parse_axes(text: str | None) -> tuple[str, ...]:
    """Read the names of dynamic axes from `batch,seq`; `none` means no axis.

    Raises:
        UsageError: a name is empty, or given twice.
    """
    names = () if text is None or text == "none" else tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise UsageError(f"--dynamic is {text!r}.", fix="Write --dynamic batch,seq.")
    return names


def refuse_options(given: Collection[str], refused: Collection[str], what: str) -> None:
    """Refuse options that do not apply here, rather than ignore them.

    Raises:
        UsageError: one of them is given.
    """
    for name in sorted(set(given) & set(refused)):
        option = "--" + {"module_input": "input"}.get(name, name.replace("_", "-"))
        raise UsageError(f"{option} does not apply to {what}.", fix=f"Leave {option} out.")


def export_users_module(
    options: Mapping[str, Any],
    step: Callable[[str], None],
    *,
    factory: str | None,
    factory_args: str | None,
    weights: Path | None,
    module_input: Sequence[str] | None,
    load_inputs: Path | None,
    allow_pickle: bool,
    entry: str | None,
    output: Path | None,
    dry_run: bool,
) -> tuple[Path, ExportReport | ReplacementReport]:
    """Make the module and export it, or with `dry_run` only replace its layers.

    Return the path of the file, and the report.

    Args:
        options: arguments of `localattn.export_module`.
        step: called with each step as it begins.
        factory: the function that makes it; None for a pickled module.
        factory_args: its arguments, JSON.
        weights: checkpoint, or the pickled module.
        module_input: one `name:dtype:[shape]` each.
        load_inputs: an .npz of inputs instead.
        allow_pickle: whether code in the checkpoint may run.
        entry: which weights to read where the checkpoint holds several sets; None chooses.
        output: the file to write; None for a name after the weights, or the function.
        dry_run: whether to stop before the export.
    """
    from ...exporter.user_module.export_module import ModuleOptions, plan_module
    from ...exporter.user_module.factory import module_from_factory, module_from_pickle
    from ...runtime.inputs.arrays import load_arrays
    from ..api.exporting import export_module

    if module_input and load_inputs is not None:
        raise UsageError("--input and --load-inputs exclude each other.", fix="Give only one of them.")
    if not module_input and load_inputs is None:
        raise UsageError("The module's inputs are not given.", fix="Add --input name:dtype:[shape], or --load-inputs.")
    if allow_pickle and weights is not None:
        warn(
            f"--allow-pickle runs any code that {weights} contains: whoever wrote that file can do anything "
            "that you can on this machine"
        )
    step("Making the module")
    if factory is not None:
        module, origin = module_from_factory(factory, factory_args, weights, allow_pickle=allow_pickle, entry=entry)
    else:
        assert weights is not None
        module, origin = module_from_pickle(weights, entry)
    inputs: Inputs = load_arrays(load_inputs) if load_inputs is not None else module_input or []
    if output is None:
        output = _named_after(weights, factory)
    if dry_run:
        return output, plan_module(module, inputs, output, ModuleOptions(**options), origin)
    return output, export_module(module, inputs, output, **options, origin=origin, progress=step)


def _named_after(weights: Path | None, factory: str | None) -> Path:
    """Return the default output: in the weights' folder, else named after the function."""
    if weights is not None:
        return weights.with_suffix(".onnx")
    return Path(f"{(factory or 'model').rpartition(':')[2]}.onnx")


def print_module(output: Path, outcome: ExportReport | ReplacementReport, *, as_json: bool) -> None:
    """Print the result of an export, or of a dry run."""
    from ...exporter.export import ExportReport
    from ...exporter.user_module.export_module import ModuleExportReport

    if isinstance(outcome, ExportReport):
        if as_json:
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
