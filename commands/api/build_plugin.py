"""Choose the plugin of `localattn build`: an existing library, a new one, ahead-of-time kernels, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from ...core.error_texts import argument
from ...core.errors import LocalAttnError, MissingDependency, UsageError

if TYPE_CHECKING:
    from ...core.storage.library_store import Library
    from ...onnx_graph.onnx_file import OnnxFile
    from ...plugins.kernel.compile import AnySpec
    from ...plugins.kernel.targets import Target
    from ...runtime.backends.building import BuildingBackend
    from ...runtime.backends.engines import PluginChoice

# What computes the attention node.
PluginKind = Literal["auto", "library", "aot", "none"]


def check_plugin(kind: str, library: Path | None) -> None:
    """Refuse an unknown kind of plugin, and a library with a kind that does not use one.

    Raises:
        UsageError: one of these.
    """
    if kind not in get_args(PluginKind):
        raise UsageError(f"Unknown plugin {kind!r}.", fix=f"Known: {', '.join(get_args(PluginKind))}.")
    if library is not None and kind not in ("auto", "library"):
        raise UsageError(
            f"{argument('plugin', kind)} and {argument('plugin_library')} exclude each other.",
            fix="Leave one of them out.",
        )


def choose_plugin(
    kind: PluginKind,
    library: Path | None,
    model: OnnxFile,
    builder: BuildingBackend,
    capabilities: Sequence[int],
    progress: Callable[[str], None],
) -> tuple[PluginChoice, list[str]]:
    """Choose the plugin to build with; return it and notes for the user about the choice.

    `auto` uses the newest plugin library of this machine with the kernels that the model needs for these GPUs, else
    builds one, else leaves the node to its ONNX function and says why.

    Args:
        kind: what was asked for, as `check_plugin` accepts it.
        library: the library that was named.
        model: the ONNX file.
        builder: the runtime to build for.
        capabilities: the GPUs to build for, 89 for 8.9.
        progress: called with each step.

    Raises:
        UsageError: a library that lacks a kernel, or a model that no plugin serves.
        MissingDependency: a plugin was asked for, and what makes it is missing.
        BuildFailed: a plugin was asked for, and could not be built.
    """
    from ...core.documents.engine_sidecar import KernelName
    from ...plugins.library.selection import without_kernel
    from ...runtime.backends.engines import PluginChoice

    if kind == "none":
        return PluginChoice(), []
    builder.check_buildable(model, capabilities)  # before a library is built
    left = [f"{name} is built from its ONNX function: {why}" for name, why in without_kernel(model).items()]
    if kind == "aot":
        return _inside_engine(builder, capabilities), left
    try:
        found, specs = _library(library, model, capabilities, progress)
    except LocalAttnError as error:
        if kind == "library" or library is not None:
            raise
        reason = " ".join(line for line in (error.what, error.why) if line)
        return PluginChoice(asked="auto"), [f"no plugin: {reason} Attention is built from standard operators"]
    if found is None:
        unserved = "has no attention node that a plugin can compute"
        if kind == "library":
            fix = f"Build it with {argument('plugin', 'none')}, or {argument('plugin', 'auto')}."
            raise UsageError(f"{model.name} {unserved}.", why="; ".join(left), fix=fix)
        return PluginChoice(asked="auto"), [*left, f"the model {unserved}"]
    kernels = tuple(KernelName(**asdict(spec)) for spec in specs)
    return PluginChoice("library", library=found, kernels=kernels, asked=kind), left


def _library(
    named: Path | None, model: OnnxFile, capabilities: Sequence[int], progress: Callable[[str], None]
) -> tuple[Library | None, list[AnySpec]]:
    """Return the plugin library for this model and these GPUs, and the kernels it needs; None if it needs none."""
    from ...core.storage.library_store import TENSORRT_PLUGIN, read_named
    from ...plugins.library.selection import needed_by
    from ...plugins.library.sidecar import find_library, host_arch, parse_sidecar

    progress("Looking for the plugin library")
    specs, targets = needed_by(model), _gpus(capabilities)
    if not specs:
        return None, []
    if named is not None:
        library = read_named(TENSORRT_PLUGIN, named)
        known = parse_sidecar(library.sidecar, named) if library.sidecar else None
        missing = known.missing(specs, targets, any_products=True) if known else []
        if missing:
            raise UsageError(
                f"{named} lacks kernels that the model needs.",
                why=f"Missing: {', '.join(missing[:4])}{' …' if len(missing) > 4 else ''}.",
                fix="Build one for the model: localattn plugin build MODEL.onnx.",
            )
        return library, specs
    return find_library(host_arch(), specs, targets) or _build(specs, targets, progress), specs


def _gpus(capabilities: Sequence[int]) -> list[Target]:
    """Return the kernel's targets for these GPUs; a GPU without a target runs the oldest target's PTX."""
    from ...plugins.kernel.targets import TARGETS, Target, target

    oldest = min(known.capability for known in TARGETS.values())
    found = []
    for capability in capabilities:
        name = f"sm_{capability}"
        known = name in TARGETS or capability < oldest
        found.append(target(name) if known else Target(capability, 80, "mma", "no kernel for this node"))
    return found


def _build(specs: list[AnySpec], targets: list[Target], progress: Callable[[str], None]) -> Library:
    """Build a library with these kernels, named by its content: engines built with another one stay valid."""
    import hashlib

    from ...core.storage.library_store import TENSORRT_PLUGIN, StoredLibrary, prepare_cache
    from ...plugins.kernel.targets import TARGETS
    from ...plugins.library.build import build_library
    from ...plugins.library.sidecar import host_arch

    arch = host_arch()
    own = [target for target in targets if target.name in TARGETS] or [next(iter(TARGETS.values()))]
    names = (*(spec.name for spec in specs), *(target.name for target in own))
    content = "\n".join((TENSORRT_PLUGIN.fingerprint(), *names))
    name = f"liblocalattn_plugin-{hashlib.sha256(content.encode()).hexdigest()[:12]}.so"
    path = prepare_cache(arch) / name
    sidecar = build_library(path, specs=specs, targets=own, arch=arch, overwrite=True, progress=progress)
    return StoredLibrary(TENSORRT_PLUGIN, path, sidecar.model_dump(mode="json")).read()


def _inside_engine(builder: BuildingBackend, capabilities: Sequence[int]) -> PluginChoice:
    """Put kernels inside the engine, as ahead-of-time plugins."""
    from ...core.nodes.gpu import SERVED
    from ...plugins.aot.availability import why_not
    from ...plugins.aot.register import register_plugins
    from ...plugins.kernel.targets import target
    from ...runtime.backends import registry
    from ...runtime.backends.engines import PluginChoice

    if not builder.kernels_inside:
        able = [other.name for other in registry.builders() if other.kernels_inside]
        raise UsageError(
            f"{builder.name} cannot put the kernels into the engine.",
            why=f"Only {', '.join(able)} supports ahead-of-time plugins.",
            fix=f"Use {argument('plugin', 'library')}.",
        )
    reason = why_not()
    if reason:
        raise MissingDependency(
            "The kernels cannot be put into the engine.",
            why=f"{reason}.",
            fix=f"Use {argument('plugin', 'library')}.",
        )
    gpu = target(f"sm_{capabilities[0]}")
    served = tuple(node.op_type for node in SERVED)
    return PluginChoice("aot", register=lambda: register_plugins(gpu), op_types=served, asked="aot")
