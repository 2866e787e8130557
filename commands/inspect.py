"""`localattn inspect`: what a checkpoint or an exported file is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import (
    Format,
    FormatOption,
    QuietOption,
    VerboseOption,
    bytes_text,
    print_checks,
    print_json,
    say,
)

if TYPE_CHECKING:
    from ..runtime.inspect_onnx import OnnxFacts


def inspect(
    file: Annotated[Path, typer.Argument(help="A checkpoint, or a model.onnx.", show_default=False)],
    config: Annotated[Path | None, typer.Option(help="Configuration of the checkpoint.")] = None,
    output_format: FormatOption = Format.console,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what a checkpoint or an exported model is.

    Of a checkpoint: its class, what its weights tell, what a configuration has to add, what is missing. Of a
    model: inputs and outputs, attention windows, sizes, and what its sidecar says of its checks.
    """
    if file.suffix == ".onnx":
        from ..runtime.inspect_onnx import inspect_onnx

        facts = inspect_onnx(file)
        if output_format is Format.json:
            print_json(facts.to_dict())
        else:
            _print_model(facts)
        return
    from ..exporter.describe import describe_checkpoint

    description = describe_checkpoint(file, config)
    if output_format is Format.json:
        print_json(description)
    else:
        _print_checkpoint(description)


def _print_model(facts: OnnxFacts) -> None:
    opsets = ", ".join(f"{domain} {number}" for domain, number in facts.opsets.items())
    say(f"{facts.path}  {bytes_text(facts.file_bytes)}, IR {facts.ir_version}, {opsets}, by {facts.producer}")
    for spec in facts.inputs:
        say(f"  input   {spec.describe()}")
    for spec in facts.outputs:
        say(f"  output  {spec.describe()}")
    say(f"  weights {bytes_text(facts.initializer_bytes)}, {facts.weight_dtype or 'none'}")
    for name in facts.external_data:
        say(f"  data    {name}{' MISSING' if name in facts.missing_external_data else ''}")
    counts = sorted(facts.nodes.items(), key=lambda item: (-item[1], item[0]))
    say(f"  nodes   {sum(facts.nodes.values())}: {', '.join(f'{name} {count}' for name, count in counts[:8])} …")
    for function in facts.functions:
        say(f"  body    {function.domain}::{function.name} in {function.nodes} standard operators")
    say("Attention windows:" if facts.windowed else "No attention windows.")
    for node in facts.windowed:
        say(f"  {node.name}  {_window(node.attributes)}")
    _print_sidecar(facts)


def _window(attributes: dict[str, Any]) -> str:
    from ..core.node import geometry_of

    try:
        return geometry_of(attributes).describe()
    except KeyError as missing:
        return f"attribute {missing} is missing"


def _print_sidecar(facts: OnnxFacts) -> None:
    if facts.sidecar is None:
        say("No sidecar: nothing is known of its checkpoint or its checks.")
        return
    if not facts.sidecar_matches:
        say("The sidecar was NOT written for this file: its SHA-256 differs. What it says is void.")
        return
    sidecar = facts.sidecar
    say(f"Exported {sidecar.created} from {sidecar.checkpoint_name} as {sidecar.class_name}. Checks then:")
    print_checks(sidecar.checks)


def _print_checkpoint(description: dict[str, Any]) -> None:
    say(
        f"{description['path']}  {description['tensors']} tensors, {description['parameters']:,} parameters, "
        f"{bytes_text(description['bytes'])}"
    )
    for line in description["notes"]:
        say(f"  note    {line}")
    say(f"Class: {description['class'] or 'cannot be told'}   Configuration: {description['config'] or 'none'}")
    for title, entries in (("Told by the weights", "inferred"), ("Configured", "given")):
        if description[entries]:
            say(f"{title}:")
            width = max(map(len, description[entries]))
            for name, entry in description[entries].items():
                origin = f"  ({entry['from']})" if entry["from"] else ""
                say(f"  {name:<{width}}  {entry['value']}{origin}")
    for title, names in (("Missing tensors", "missing"), ("Unexpected tensors", "unexpected")):
        if description[names]:
            say(f"{title}: {', '.join(description[names][:10])} ({len(description[names])})")
    if description["needed"]:
        say("Still needed:")
        for line in description["needed"].splitlines():
            say(f"  {line}")
    elif description["window"]:
        say(f"Window: {description['window']}")
