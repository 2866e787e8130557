"""Define `localattn inspect`: show what a checkpoint or an exported file is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import UsageError
from ..core.storage.wrong_file import check_exists
from .parts.console import bytes_text, note, print_checks, print_signature, say, say_page, warn
from .parts.flags import in_flags
from .parts.options import EntryOption
from .parts.paths import INPUT, ForceOption
from .parts.plugins.options import PluginLibraryOption, PluginOption, plugin_asked
from .parts.report_output import Destination, OutputOption, ReportFormatOption, choose, show

if TYPE_CHECKING:
    from ..onnx_graph.summary import OnnxSummary
    from ..runtime.backends.engines import EngineReport


_LONGEST_VALUE = 150  # characters of an argument that are printed


def inspect(
    file: Annotated[
        Path | None, typer.Argument(help="A checkpoint, a model.onnx, or a model.engine.", show_default=False), INPUT
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration of the checkpoint. (Default: found in its folder.)"), INPUT
    ] = None,
    entry: EntryOption = None,
    factory: Annotated[
        str | None,
        typer.Option(
            metavar="FUNCTION",
            help="A function that returns your own module; the checkpoint has its weights. "
            "package.module:function or file.py:function.",
        ),
    ] = None,
    factory_args: Annotated[str | None, typer.Option(metavar="JSON", help="Its keyword arguments.")] = None,
    write_config: Annotated[
        bool,
        typer.Option(
            "--write-config",
            help="Write a configuration for you to complete next to the checkpoint; an existing one is kept.",
        ),
    ] = False,
    plugin: PluginOption = "auto",
    plugin_library: PluginLibraryOption = None,
    output_format: ReportFormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
) -> None:
    """Describe a checkpoint, an exported model or an engine.

    For a checkpoint: its class, what its weights show, what a configuration has to add, what is missing. For a
    model of your own (--factory): what it takes, and its layers. For an exported
    model: inputs and outputs, attention windows, sizes, and what its sidecar says about its checks. For an engine:
    what it was built by and for, its plugin, its checks, and its layers where there is a GPU to open it.
    """
    destination = choose(output_format, output, force)
    if factory is not None:
        _inspect_module(destination, factory, factory_args, file, entry)
        return
    if file is None:
        raise typer.BadParameter("give a file, or --factory", param_hint="FILE")
    from ..runtime.backends import registry
    from ..runtime.backends.building import BuildingBackend

    backend = registry.of_file(file)
    if write_config and backend is not None:
        raise typer.BadParameter("it needs a checkpoint", param_hint="--write-config")
    if entry is not None and backend is not None:
        raise typer.BadParameter("it needs a checkpoint", param_hint="--entry")
    if isinstance(backend, BuildingBackend):
        from ..onnx_graph.windows import windows_of_sidecar

        report = backend.inspect(file, plugin_asked(plugin, plugin_library))
        windows = [view.to_dict() for view in windows_of_sidecar(report.sidecar.model)]
        document = {**report.to_dict(), "windows": windows}
        show(destination, "engine", document, lambda: _print_engine(report), ("localattn", "run", file))
    elif backend is not None:
        from ..onnx_graph.summary import inspect_onnx
        from ..onnx_graph.windows import windows_of_file

        summary = inspect_onnx(file)
        windows = [view.to_dict() for view in windows_of_file(summary)]
        document = {**summary.to_dict(), "windows": windows}
        show(destination, "onnx", document, lambda: _print_model(summary), ("localattn", "run", file))
    else:
        _inspect_checkpoint(file, config, entry, destination, write_config=write_config)


def _inspect_checkpoint(
    file: Path, config: Path | None, entry: str | None, destination: Destination, *, write_config: bool
) -> None:
    """Show what a checkpoint is, and write a configuration to complete if it is asked for."""
    check_exists(file)
    from ..exporter.checkpoint.describe import describe_checkpoint

    description = describe_checkpoint(file, config, entry)
    following: list[object] = ["localattn", "export", file]
    if description["needed"] and not write_config:
        following = ["localattn", "inspect", file]
        following = [*following, "--write-config"] if description["template"] else []
    elif config is not None:
        following += ["--config", config]
    if entry is not None and following:
        following += ["--entry", entry]
    show(destination, "checkpoint", description, lambda: _print_checkpoint(description, write_config), following)
    if write_config:
        _write_config(description, file)


def _inspect_module(
    destination: Destination, factory: str, args: str | None, weights: Path | None, entry: str | None
) -> None:
    """Describe a module of the user's own.

    Raises:
        UsageError: a page is asked for, or the module cannot be made.
    """
    if destination.format not in ("console", "json"):
        raise UsageError("There is no page about a module.", fix="Leave --format out, or give --format json.")
    if weights is not None:
        check_exists(weights)
    from ..exporter.user_module.describe import describe_module

    description = describe_module(factory, args, weights, entry)
    show(destination, "module", description, lambda: _print_module(description))


def _print_module(description: dict[str, Any]) -> None:
    say(f"{description['factory']}  {description['class']}, {description['parameters']:,} parameters")
    for line in description["notes"]:
        say(f"  note    {in_flags(line)}")
    say(f"  weights {description['weights'] or 'those that the function makes'}")
    say(f"  forward takes {', '.join(description['inputs']) or 'nothing'}: name them with --input at the export")
    say("Layers of local attention:" if description["layers"] else "No layer is local attention that is known here.")
    for layer in description["layers"]:
        window = ", ".join(f"{name} {value}" for name, value in layer.items() if name not in ("path", "class"))
        say(f"  {layer['path'] or 'the module itself'}  {layer['class']}{f'  {window}' if window else ''}")
    for line in description["warnings"]:
        warn(in_flags(line))


def _write_config(description: dict[str, Any], checkpoint: Path) -> None:
    from ..exporter.checkpoint.hidden_arguments import placeholders, write_template

    if description["template"] is None:
        what, _, why = description["needed"].partition("\n")
        raise UsageError("There is no configuration to complete.", why=what, fix=" ".join(why.splitlines()))
    config = description["config"]
    written = write_template(description["template"], checkpoint, None if config is None else Path(config))
    left = ", ".join(placeholders(description["template"]))
    note(f"Wrote {written}. {f'Fill in {left}.' if left else 'Nothing is left to fill in.'}")


def _print_model(summary: OnnxSummary) -> None:
    opsets = ", ".join(f"{domain} {number}" for domain, number in summary.opsets.items())
    say(f"{summary.path}  {bytes_text(summary.file_bytes)}, IR {summary.ir_version}, {opsets}, by {summary.producer}")
    print_signature(summary)
    say(f"  weights {bytes_text(summary.initializer_bytes)}, {summary.weight_dtype or 'none'}")
    for name in summary.external_data:
        say(f"  data    {name}{' MISSING' if name in summary.missing_external_data else ''}")
    if summary.refused:
        say(f"  REFUSED no engine may open this file: {summary.refused}")
    counts = sorted(summary.nodes.items(), key=lambda item: (-item[1], item[0]))
    say(f"  nodes   {sum(summary.nodes.values())}: {', '.join(f'{name} {count}' for name, count in counts[:8])} …")
    for function in summary.functions:
        say(f"  defines {function.domain}::{function.name} in {function.nodes} standard operators")
    plain = bool(summary.sidecar and summary.sidecar_matches and summary.sidecar.standard_ops)
    none = "No attention nodes: the attention is in standard operators." if plain else "No attention windows."
    say("Attention windows:" if summary.windowed else none)
    for node in summary.windowed:
        say(f"  {node.name}  {_window(node.attributes)}")
    _print_sidecar(summary)


def _print_engine(report: EngineReport) -> None:
    sidecar = report.sidecar
    say(
        f"{report.path}  {bytes_text(sidecar.engine_bytes)}, {sidecar.dtype}, "
        f"{sidecar.backend} {sidecar.library_version}"
    )
    say(
        f"  for     {', '.join(sidecar.targets)}, {sidecar.platform}; built {sidecar.created} on "
        f"{sidecar.device or 'a machine without a GPU'}"
    )
    say(f"  from    {sidecar.onnx_name} {sidecar.onnx_sha256[:12]}…")
    print_signature(sidecar)
    for profile in sidecar.options.profiles:
        several = f"profile {profile.profile}: " if sidecar.options.profiles[-1].profile else ""
        span = f"from {list(profile.min)} to {list(profile.max)}, best at {list(profile.opt)}"
        say(f"  sizes   {several}{profile.input} {span}")
    if sidecar.plugin is None:
        say("  plugin  none; attention is built from standard operators")
    else:
        where = sidecar.plugin.path or "inside the engine"
        say(f"  plugin  {sidecar.plugin.kind}, {len(sidecar.plugin.layers)} layers, {where}")
    for line in report.kernels:
        say(f"  kernel  {line}")
    if report.plugin_problem:
        say(f"  PROBLEM {in_flags(report.plugin_problem)}")
    if not report.unchanged:
        say("The sidecar was NOT written for this engine: its SHA-256 differs. Do not rely on the sidecar.")
    if report.layers is None:
        say(f"Layers cannot be shown on this machine: {report.why_closed}")
    else:
        kinds = ", ".join(f"{kind} {count}" for kind, count in report.layer_kinds().items())
        say(f"Layers: {len(report.layers)}: {kinds}")
    say("Checks of the build:")
    print_checks(sidecar.checks)


def _window(attributes: dict[str, Any]) -> str:
    from ..core.nodes.attention import geometry_of

    try:
        return geometry_of(attributes).describe()
    except KeyError:  # an invalid node
        return "no window"


def _print_sidecar(summary: OnnxSummary) -> None:
    from ..core.documents.proof import no_window, not_proven

    if summary.sidecar is None:
        say("No sidecar: the file's checkpoint and checks are unknown.")
        return
    if not summary.sidecar_matches:
        say("The sidecar was NOT written for this file: its SHA-256 differs. Do not rely on the sidecar.")
        return
    sidecar = summary.sidecar
    if sidecar.dynamic:
        say(f"  open    {', '.join(sidecar.dynamic)}; sequences up to {sidecar.seq_len}")
    say(f"Exported {sidecar.created} from {sidecar.checkpoint_name} as {sidecar.title}.")
    say("Checks of the export, as stated by the sidecar. Anyone who can write the sidecar can forge them;")
    say("localattn parity compares the file again:")
    print_checks(sidecar.checks)
    lines = no_window(sidecar.windows, sidecar.checks, str(summary.path))
    for line in (*lines, *not_proven(sidecar.unproven, str(summary.path))):
        warn(line)


def _print_checkpoint(description: dict[str, Any], writes_config: bool) -> None:
    say(
        f"{description['path']}  {description['tensors']} tensors, {description['parameters']:,} parameters, "
        f"{bytes_text(description['bytes'])}"
    )
    for line in description["notes"]:
        say(f"  note    {in_flags(line)}")
    for line in description["warnings"]:
        say(f"  WARNING {in_flags(line)}")
    say(f"Class: {description['class'] or 'cannot be told'}   Configuration: {description['config'] or 'none'}")
    for title, entries in (("Read from the weights", "inferred"), ("Configured", "given")):
        if description[entries]:
            say(f"{title}:")
            rows = list(_rows(description[entries]))
            width = max(len(name) for name, _ in rows)
            for name, value in rows:
                say(f"  {name:<{width}}  {value}")
    if description["unused"]:
        say("In the checkpoint, not used:")
        for entry in description["unused"]:
            say(f"  {entry['from']} {entry['value']}  ({entry['why']})")
    for title, names in (("Missing tensors", "missing"), ("Unexpected tensors", "unexpected")):
        if description[names]:
            say(f"{title}: {', '.join(description[names][:10])} ({len(description[names])})")
    if description["needed"]:
        say("Still needed:")
        for line in description["needed"].splitlines():
            say(f"  {in_flags(line)}")
    elif description["window"]:
        say(f"Window: {description['window']}")
    if (
        description["template"] is not None
        and not writes_config
        and (description["needed"] or not description["config"])
    ):
        _print_template(description)


# What is shown of a Hugging Face configuration; all of it is in JSON.
_OF_CONFIGURATION = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "sliding_window", "max_position_embeddings"),
)


def _rows(entries: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values of arguments as a table for people: nested ones are counted or left to JSON."""
    for name, entry in entries.items():
        value, origin = entry["value"], f"  ({entry['from']})" if entry["from"] else ""
        if isinstance(value, dict):
            text = value.get("text_config")
            inner = text if isinstance(text, dict) else value
            known = [(key, inner[key]) for key in _OF_CONFIGURATION if inner.get(key) is not None]
            yield from ((key, f"{_short(found)}{origin}") for key, found in known)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield name, f"{len(value)}{origin}"
        elif isinstance(value, list):
            yield name, f"{_short(', '.join(map(str, value)))}{origin}"
        elif value is not None or not entry["from"]:
            yield name, f"{_short(value)}{origin}"


def _short(value: object) -> str:
    """Return a value as one line; long values are complete only in JSON."""
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} …"


def _print_template(description: dict[str, Any]) -> None:
    """Print a configuration to complete, where something is left to fill in."""
    from ..exporter.checkpoint.hidden_arguments import placeholders, template_text

    if placeholders(description["template"]):
        say(f"Complete this and save it as {description['save_as']} (--write-config writes that file):")
        say_page(template_text(description["template"]))
