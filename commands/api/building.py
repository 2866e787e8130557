"""Define `localattn.build`: from an exported file to a TensorRT engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...core.error_texts import argument
from ...core.errors import UsageError
from .build_plugin import PluginKind, check_plugin, choose_plugin
from .notebook import IN_NOTEBOOKS
from .paths import as_path

if TYPE_CHECKING:
    from ...core.documents.engine_sidecar import ProfileRecord
    from ...runtime.backends.engines import BuildReport

Shapes = Mapping[str, Sequence[int]]
# Sizes for one optimization profile, or for several in order.
Profiles = Shapes | Sequence[Shapes]


def build(
    model: str | Path,
    output: str | Path | None = None,
    *,
    backend: Literal["tensorrt", "tensorrt-rtx"] = "tensorrt",
    target: Sequence[str] = (),
    device: int = 0,
    plugin: PluginKind = "auto",
    plugin_library: str | Path | None = None,
    timing_cache: str | Path | None = None,
    workspace: int | None = None,
    builder_optimization_level: int | None = None,
    min_shapes: Profiles | None = None,
    opt_shapes: Profiles | None = None,
    max_shapes: Profiles | None = None,
    version_compatible: bool = False,
    hardware_compatible: Literal["ampere-plus", "same-capability"] | None = None,
    refit: bool = False,
    strip_weights: bool = False,
    embed_plugin: bool = False,
    overwrite: bool = False,
    progress: Callable[[str], None] = IN_NOTEBOOKS,
) -> BuildReport:
    """Build an engine, and check it against the request.

    Args:
        model: the exported ONNX file.
        output: the engine; by default the model's name with .engine.
        backend: "tensorrt", on the GPU that will run it, or "tensorrt-rtx", anywhere.
        target: GPUs as "rtx40" or "sm_89"; by default this machine's.
        device: number of the GPU to build on.
        plugin: "auto", "library", "aot" for kernels inside the engine, or "none" for standard operators.
        plugin_library: path of the plugin library to use.
        timing_cache: file of measured kernel times, read and extended.
        workspace: scratch memory of a layer, in MiB.
        builder_optimization_level: 0 to 5; higher searches longer.
        min_shapes: smallest sizes of inputs with dynamic axes, by name; a list of such for several profiles.
        opt_shapes: sizes that the engine is fastest at, likewise.
        max_shapes: largest sizes, likewise.
        version_compatible: later releases of TensorRT run it too.
        hardware_compatible: other GPUs run it too: all from Ampere on, or all of its compute capability.
        refit: its weights can be replaced.
        strip_weights: leave its weights out; they are put in by TensorRT's refitter.
        embed_plugin: put the plugin library into the engine.
        overwrite: replace an existing engine.
        progress: called with each step as it begins.

    Raises:
        UsageError: an argument or the file cannot be used.
        MissingDependency: the library, its driver or a GPU is not there.
        BuildFailed: the build failed, or the engine is not what was asked for.
    """
    from ...onnx_graph.onnx_file import OnnxFile
    from ...runtime.backends import registry
    from ...runtime.backends.engines import BuildRequest
    from ...runtime.parity.files import check_built_engine

    progress("Reading the model")
    builder, library = registry.builder(backend), as_path(plugin_library)
    check_plugin(plugin, library)
    model = Path(model)
    profiles = _profiles(min_shapes, opt_shapes, max_shapes)
    file, targets = OnnxFile.read(model), tuple(name for name in target if name.strip())
    capabilities = builder.targets(targets, device)
    choice, notes = choose_plugin(plugin, library, file, builder, capabilities, progress)
    request = BuildRequest(
        model=file,
        output=model.with_suffix(".engine") if output is None else Path(output),
        backend=backend,
        targets=targets,
        device=device,
        plugin=choice,
        timing_cache=as_path(timing_cache),
        workspace=None if workspace is None else workspace << 20,  # from MiB to bytes
        builder_optimization_level=builder_optimization_level,
        profiles=profiles,
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,
        refit=refit,
        strip_weights=strip_weights,
        embed_plugin=embed_plugin,
        overwrite=overwrite,
    )
    report = builder.build(request, progress, check_built_engine)
    return replace(report, notes=[*notes, *report.notes])


def _profiles(low: Profiles | None, opt: Profiles | None, high: Profiles | None) -> list[ProfileRecord]:
    """Join the three arguments for dynamic axes.

    Raises:
        UsageError: one of the three is missing, has other profiles, or names other inputs than the others.
    """
    from ...core.documents.engine_sidecar import ProfileRecord

    smallest, best, largest = _listed(low), _listed(opt), _listed(high)
    names = [[profile.keys() for profile in profiles] for profiles in (smallest, best, largest)]
    if not names[0] == names[1] == names[2]:
        raise UsageError(
            f"{argument('min_shapes')}, {argument('opt_shapes')} and {argument('max_shapes')} must be given together.",
            why="Each needs the same number of profiles, with the same inputs.",
            fix="Give for example the sizes 1x1, 1x512 and 1x1024 for an input.",
        )
    return [
        ProfileRecord(profile=number, input=name, min=tuple(sizes), opt=tuple(fastest[name]), max=tuple(most[name]))
        for number, (least, fastest, most) in enumerate(zip(smallest, best, largest, strict=True))
        for name, sizes in least.items()
    ]


def _listed(shapes: Profiles | None) -> list[Shapes]:
    if not shapes:
        return []
    return [shapes] if isinstance(shapes, Mapping) else list(shapes)
