"""`localattn build`: from an ONNX file to an engine."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.limits import LARGEST_WORKSPACE_MIB, is_size
from ..core.storage.file_kinds import ENGINE, TIMING_CACHE
from .parts.build_plugin import PluginKind, choose_plugin
from .parts.console import (
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
from .parts.paths import INPUT, ForceOption, OutputPath

if TYPE_CHECKING:
    from ..core.documents.engine_facts import ProfileFacts
    from ..runtime.engine.builder.build import BuildReport


class Backend(str, Enum):
    """The library that builds and runs the engine."""

    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt-rtx"


_SHAPES = "as tokens:1x1024,mask:1x1024."


def build(
    model: Annotated[Path, typer.Argument(help="The exported model (model.onnx).", show_default=False), INPUT],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The engine to write. (Default: MODEL with .engine.)"),
        OutputPath(ENGINE),
    ] = None,
    backend: Annotated[
        Backend, typer.Option(help="tensorrt (on the device), or tensorrt-rtx (RTX GPUs; needs no GPU to build).")
    ] = Backend.tensorrt,
    target: Annotated[
        str | None,
        typer.Option(
            help="GPUs: rtx30, rtx40, rtx50, sm_89, …, with commas. "
            "(Default: the GPU here; for tensorrt-rtx without one: rtx30,rtx40,rtx50.)"
        ),
    ] = None,
    plugin: Annotated[
        PluginKind,
        typer.Option(
            help="auto: a plugin library if one is there or can be built; library: that or nothing; "
            "aot: kernels inside the engine; none: standard operators."
        ),
    ] = PluginKind.auto,
    plugin_library: Annotated[Path | None, typer.Option(help="Use this plugin library."), INPUT] = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(help="File of measured kernel times: read, and extended. (TensorRT only.)"),
        OutputPath(TIMING_CACHE),
    ] = None,
    workspace: Annotated[
        int | None, typer.Option(min=1, max=LARGEST_WORKSPACE_MIB, help="Scratch memory of a layer in MiB.")
    ] = None,
    builder_optimization_level: Annotated[
        int | None, typer.Option(min=0, max=5, help="Higher searches longer for faster kernels.")
    ] = None,
    min_shapes: Annotated[str | None, typer.Option(help=f"Smallest sizes of open dimensions, {_SHAPES}")] = None,
    opt_shapes: Annotated[str | None, typer.Option(help="Sizes to be fastest at.")] = None,
    max_shapes: Annotated[str | None, typer.Option(help="Largest sizes.")] = None,
    force: ForceOption = False,
    output_format: FormatOption = Format.console,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Build an engine, and look whether it is what was asked for.

    Every precision is the ONNX file's. TensorRT builds on the GPU that will run the engine; TensorRT-RTX builds
    anywhere. An engine without the plugin or the precision asked for is not written: exit code 5.
    """
    with progress() as step:
        step("Reading the model")
        from ..onnx_graph.onnx_file import OnnxFile
        from ..runtime.engine.builder.build import build_engine, plan_targets
        from ..runtime.engine.builder.request import BuildRequest

        path = output if output is not None else model.with_suffix(".engine")
        profiles = parse_profiles(min_shapes, opt_shapes, max_shapes)
        file = OnnxFile.read(model)
        wanted = tuple(name for name in (target or "").split(",") if name.strip())
        capabilities = plan_targets(backend.value, wanted)
        choice, notes = choose_plugin(plugin, plugin_library, file, backend.value, capabilities, step)
        request = BuildRequest(
            model=file,
            output=path,
            backend=backend.value,
            targets=wanted,
            plugin=choice,
            timing_cache=timing_cache,
            workspace=None if workspace is None else workspace << 20,
            builder_optimization_level=builder_optimization_level,
            profiles=profiles,
            overwrite=force,
        )
        report = build_engine(request, step)
    notes += report.notes
    if output_format is Format.json:
        facts = report.facts.model_dump(mode="json", by_alias=True)
        print_json({"engine": str(report.path), "notes": notes, **facts})
        return
    for line in notes:
        note(f"Note: {line}")
    _print_report(report)


def parse_profiles(low: str | None, opt: str | None, high: str | None) -> list[ProfileFacts]:
    """The three options for open sizes, in trtexec's spelling.

    Raises:
        UsageError: one of the three is missing, does not parse, or names other inputs than the others.
    """
    from ..core.documents.engine_facts import ProfileFacts
    from ..core.errors import UsageError

    given = {"--min-shapes": low, "--opt-shapes": opt, "--max-shapes": high}
    if not any(given.values()):
        return []
    shapes = {name: _shapes(name, text) for name, text in given.items()}
    if len({frozenset(sizes) for sizes in shapes.values()}) != 1:
        raise UsageError(
            "--min-shapes, --opt-shapes and --max-shapes go together.",
            why="Each must name the same inputs.",
            fix="For example: --min-shapes tokens:1x1 --opt-shapes tokens:1x512 --max-shapes tokens:1x1024.",
        )
    smallest, best, largest = shapes.values()
    return [ProfileFacts(input=name, min=smallest[name], opt=best[name], max=largest[name]) for name in smallest]


def _shapes(option: str, text: str | None) -> dict[str, tuple[int, ...]]:
    from ..core.errors import UsageError

    found: dict[str, tuple[int, ...]] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, _, sizes = part.strip().rpartition(":")
        numbers = sizes.split("x")
        if not name or not all(is_size(number) for number in numbers):
            raise UsageError(f"{option} {part.strip()[:80]!r} is no shape.", fix="Write INPUT:1x1024.")
        found[name] = tuple(map(int, numbers))
    return found


def _print_report(report: BuildReport) -> None:
    facts = report.facts
    say(
        f"{report.path}  {facts.backend} {facts.library_version} for {', '.join(facts.targets)}, {facts.dtype}, "
        f"{bytes_text(facts.engine_bytes)}, built in {facts.seconds:.1f} s"
    )
    for spec in facts.inputs:
        say(f"  input   {spec.describe()}")
    for spec in facts.outputs:
        say(f"  output  {spec.describe()}")
    if facts.plugin is not None:
        say(f"  plugin  {facts.plugin.kind}{f', {facts.plugin.path}' if facts.plugin.path else ''}")
    say("Checks:")
    print_checks(facts.checks)
