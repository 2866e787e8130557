"""Define `localattn build`: from an ONNX file to an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..core.errors import UsageError
from ..core.limits import LARGEST_WORKSPACE_MIB, is_size
from ..core.storage.file_kinds import ENGINE, TIMING_CACHE
from .api.build_plugin import PluginKind
from .parts.console import bytes_text, print_checks, print_json, print_notes, print_signature, progress, say, suggest
from .parts.declared import from_fields
from .parts.options import FormatOption
from .parts.paths import INPUT, ForceOption, OutputPath
from .parts.plugins.options import EngineBackend, PluginLibraryOption

if TYPE_CHECKING:
    from ..runtime.backends.engines import BuildReport

_SHAPES = "as tokens:1x1024,mask:1x1024."


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How `localattn build` builds an engine."""

    backend: Annotated[
        EngineBackend,
        typer.Option(
            help="The inference library it is for: tensorrt (built on the device), or tensorrt-rtx (RTX GPUs; needs no "
            "GPU to build)."
        ),
    ] = "tensorrt"
    target: Annotated[
        str | None,
        typer.Option(
            help="GPUs: rtx30, rtx40, rtx50, sm_89, …, with commas. "
            "(Default: the GPU here; for tensorrt-rtx without one: rtx30,rtx40,rtx50.)"
        ),
    ] = None
    device: Annotated[
        int, typer.Option(min=0, max=999, help="The GPU to build on, by number, where there are several.")
    ] = 0
    plugin: Annotated[
        PluginKind,
        typer.Option(
            help="What computes the attention node: auto: compiled kernels where there are any or can be built; "
            "library: those or nothing; aot: kernels inside the engine; none: standard operators."
        ),
    ] = "auto"
    plugin_library: PluginLibraryOption = None
    timing_cache: Annotated[
        Path | None,
        typer.Option(help="File of measured kernel times, which is read and extended. (TensorRT only.)"),
        OutputPath(TIMING_CACHE),
    ] = None
    workspace: Annotated[
        int | None, typer.Option(min=1, max=LARGEST_WORKSPACE_MIB, help="Scratch memory per layer in MiB.")
    ] = None
    builder_optimization_level: Annotated[
        int | None, typer.Option(min=0, max=5, help="Higher levels search longer for faster kernels.")
    ] = None
    min_shapes: Annotated[
        list[str] | None,
        typer.Option(help=f"Smallest sizes of dynamic axes, {_SHAPES} Repeat it for more profiles."),
    ] = None
    opt_shapes: Annotated[list[str] | None, typer.Option(help="Sizes that each profile is optimized for.")] = None
    max_shapes: Annotated[list[str] | None, typer.Option(help="Largest sizes of each profile.")] = None
    version_compatible: Annotated[
        bool,
        typer.Option(
            "--version-compatible", help="Let later releases of TensorRT run the engine too. (TensorRT only.)"
        ),
    ] = False
    hardware_compatible: Annotated[
        Literal["ampere-plus", "same-capability"] | None,
        typer.Option(
            help="Let other GPUs run the engine too: all from Ampere on, or those of the same capability. (TensorRT "
            "only.)"
        ),
    ] = None
    refit: Annotated[bool, typer.Option("--refit", help="Let the engine's weights be replaced later.")] = False
    strip_weights: Annotated[
        bool, typer.Option("--strip-weights", help="Leave the weights out; TensorRT's refitter adds them later.")
    ] = False
    embed_plugin: Annotated[
        bool,
        typer.Option(
            "--embed-plugin", help="Put the plugin library into the engine, for hosts that allow code in engines."
        ),
    ] = False


@from_fields
def build(
    *,
    model: Annotated[Path, typer.Argument(help="The exported model (model.onnx).", show_default=False), INPUT],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The engine to write. (Default: MODEL with .engine.)"),
        OutputPath(ENGINE),
    ] = None,
    options: EngineOptions,
    force: ForceOption = False,
    output_format: FormatOption = "console",
) -> None:
    """Build an engine, and check it against the request.

    Every precision is the ONNX file's. TensorRT builds on the GPU that will run the engine; TensorRT-RTX builds
    anywhere. Where the engine runs, it is compared with the ONNX file; elsewhere the report says that it was not. An
    engine without the plugin or the precision asked for, or with other outputs, is not written: exit code 5.
    """
    arguments: dict[str, Any] = dict(vars(options))
    arguments["target"] = (options.target or "").split(",")
    for name in ("min_shapes", "opt_shapes", "max_shapes"):
        arguments[name] = [parse_shapes(f"--{name.replace('_', '-')}", text) for text in arguments[name] or ()]
    with progress() as step:
        from .api.building import build as build_engine

        report = build_engine(model, output, **arguments, overwrite=force, progress=step)
    if output_format == "json":
        sidecar = report.sidecar.model_dump(mode="json", by_alias=True)
        verdict = {"passed": report.passed, "outcomes": report.outcomes}
        print_json({"engine": str(report.path), **verdict, "notes": report.notes, **sidecar})
        return
    print_notes(report.notes)
    _print_report(report)
    library = None if report.sidecar.plugin is None else report.sidecar.plugin.path
    named = () if library is None else ("--plugin-library", library)
    suggest("localattn", "parity", report.path, "--against", model, *named)


def parse_shapes(option: str, text: str | None) -> dict[str, tuple[int, ...]]:
    """Read the sizes of an option for dynamic axes, in trtexec's spelling: `tokens:1x1024,mask:1x1024`.

    Raises:
        UsageError: it does not parse.
    """
    found: dict[str, tuple[int, ...]] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, _, sizes = part.strip().rpartition(":")
        numbers = sizes.split("x")
        if not name or not all(is_size(number) for number in numbers):
            raise UsageError(f"{option}: {part.strip()[:80]!r} is not a shape.", fix="Write INPUT:1x1024.")
        found[name] = tuple(map(int, numbers))
    return found


def _print_report(report: BuildReport) -> None:
    sidecar = report.sidecar
    say(
        f"{report.path}  {sidecar.backend} {sidecar.library_version} for {', '.join(sidecar.targets)}, "
        f"{sidecar.dtype}, {bytes_text(sidecar.engine_bytes)}, built in {sidecar.seconds:.1f} s"
    )
    print_signature(sidecar)
    if sidecar.plugin is not None:
        say(f"  plugin  {sidecar.plugin.kind}{f', {sidecar.plugin.path}' if sidecar.plugin.path else ''}")
    say("Checks:")
    print_checks(sidecar.checks)
