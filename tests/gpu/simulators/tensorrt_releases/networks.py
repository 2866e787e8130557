"""Child program: the registry, parsing and building with the bindings of one release; prints what it saw as JSON.

`python -m tests.gpu.simulators.tensorrt_releases.networks` reads, as JSON, {"parts": …, "names": class → names,
"library": plugin library, "models": name → [ONNX file, "library" or "none"], "served": an ONNX file whose nodes the
library serves,
"unknown": an ONNX file with an operator that nobody knows, "aot": whether ahead-of-time plugins are asked for too}.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from localattn.core.documents.engine_sidecar import ProfileRecord
from localattn.core.errors import LocalAttnError
from localattn.core.storage.file_kinds import contents_of
from localattn.core.storage.library_store import TENSORRT_PLUGIN, Library, read_named
from localattn.core.tensorrt_versions import FEATURES
from localattn.doctor.probe_process import package
from localattn.plugins.library.registry import available_backends, load_into_registry
from localattn.runtime.backends.engines import BuildRequest, PluginChoice
from localattn.runtime.backends.tensorrt.builder import network
from localattn.runtime.backends.tensorrt.builder.checks import check_network
from localattn.runtime.backends.tensorrt.builder.source import profiles_for, read_source
from localattn.runtime.backends.tensorrt.builder.timing_cache import extend, stage
from localattn.runtime.backends.tensorrt.library import TensorRTLibrary, open_library
from localattn.runtime.backends.tensorrt.plugins import loaded_plugin, registered_op_types

from .bind import Parts, bind

WORKSPACE, LEVEL = 64 << 20, 1


def main(asked: dict[str, Any]) -> dict[str, Any]:
    parts, library = Parts(**asked["parts"]), read_named(TENSORRT_PLUGIN, Path(asked["library"]))
    trt = bind(parts)
    opened = open_library("tensorrt")
    scratch, served = Path(parts.scratch), Path(asked["served"])
    registry = load_into_registry(library, ["tensorrt"])
    return {
        "version": opened.version,
        "is_rtx": opened.library.is_rtx,
        "backends": available_backends(),
        "features": {feature: opened.has(feature) for feature in FEATURES},
        "api": api(trt),
        "doctor": package("tensorrt"),
        "missing": missing(trt, asked["names"]),
        "other": refused(lambda: open_library("tensorrt-rtx")),
        "creators": [[c.name, c.version, c.namespace, len(c.attributes)] for c in registry.creators],
        "models": {
            name: model(opened, Path(path), library if kind == "library" else None, scratch / f"{name}.times")
            for name, (path, kind) in asked["models"].items()
        },
        "kinds": kinds(opened, served, library),
        "stripped": stripped(opened, served, library),
        "aot": refused(lambda: network.parse(opened, read_source(served), "aot", [])) if asked["aot"] else [],
        "unknown": refused(lambda: network.parse(opened, read_source(Path(asked["unknown"])), "none", [])),
        "build": command("build", served, "-o", scratch / "no.engine", "--backend", "tensorrt", "--plugin", "none"),
        "check": command("plugin", "check", library.path, "--backend", "tensorrt", "--format", "json"),
        "files": sorted(path.name for path in scratch.glob("no.engine*")),
    }


def api(trt: Any) -> dict[str, Any]:
    """What the feature table says of releases, as the bindings have it."""
    return {
        "flags": sorted(trt.NetworkDefinitionCreationFlag.__members__),
        "weakly_typed_precisions": sorted({"FP16", "BF16", "INT8"} & set(trt.BuilderFlag.__members__)),
        "timing_cache": hasattr(trt.IBuilderConfig, "create_timing_cache"),
        "compute_capabilities": hasattr(trt, "ComputeCapability"),
        "aliases": hasattr(trt.ICudaEngine, "get_aliased_input_tensor"),
    }


def missing(trt: Any, names: dict[str, list[str]]) -> list[str]:
    """Names of classes that this release has not."""
    owners = {kind: trt if not kind else getattr(trt, kind, None) for kind in names}
    return sorted(
        f"{kind}.{name}" for kind, wanted in names.items() for name in wanted if not hasattr(owners[kind], name)
    )


def refused(work: Callable[[], object]) -> list[str]:
    """How work was refused: the error's class, what and why."""
    try:
        work()
    except LocalAttnError as error:
        return [type(error).__name__, error.what, error.why]
    return []


def model(opened: TensorRTLibrary, path: Path, library: Library | None, times: Path) -> dict[str, Any]:
    """A file parsed, checked and built, with every option of a build."""
    source = read_source(path)
    plugin = PluginChoice("none" if library is None else "library", library=library)
    profiles = profiles_for(source, given(source))
    asked = BuildRequest(
        path, times.with_suffix(".engine"), "tensorrt", plugin=plugin, timing_cache=times, workspace=WORKSPACE,
        builder_optimization_level=LEVEL, profiles=profiles,
    )  # fmt: skip
    with loaded_plugin(opened, library):
        op_types = registered_op_types(opened)
        nodes = source.nodes(op_types)
        parsed = network.parse(opened, source, plugin.kind, op_types)
        checks = check_network(opened, parsed.definition, source, nodes)
        kinds = [str(parsed.definition.get_layer(i).type) for i in range(parsed.definition.num_layers)]
        shown: dict[str, Any] = {
            "op_types": op_types,
            "nodes": len(nodes),
            "plugins": sum(kind.endswith("PLUGIN_V3") for kind in kinds),
            "checks": {check.name: check.status for check in checks},
        }
        lines: list[str] = []
        folder = times.with_suffix("")
        folder.mkdir()
        copy = stage(opened, parsed.builder, times, folder)
        with configurations(opened, parsed.definition) as made:
            engine = network.build(opened, parsed, asked, [], profiles, lines.append, copy)
        left = [extend(parsed.builder, times, copy.read_bytes()) for _ in range(2)]  # made, then combined
        shown |= {
            "engine": memoryview(engine).nbytes,
            "lines": list(lines),
            "config": made,
            "times": [contents_of(times), *left],
            "staged": stage(opened, parsed.builder, times, folder).read_bytes() == times.read_bytes(),
        }
        shown["sizes"] = made.pop("sizes")
        shown["named"] = b"localattn" in bytes(engine)
        shown["again"] = memoryview(network.build(opened, parsed, asked, [], profiles, lines.append, copy)).nbytes
        shown["cancelled"] = cancelled(opened, parsed, asked, profiles)
    shown["left"] = registered_op_types(opened)
    return shown


def given(source: Any) -> list[ProfileRecord]:
    """Sizes for the file's dynamic axes: batches of 1 to 4, lengths of 16 to 64."""
    sizes = {"batch": (1, 2, 4), "seq": (16, 32, 64)}

    def profile(spec: Any) -> ProfileRecord:
        low, opt, top = (tuple(sizes[s][i] if isinstance(s, str) else s for s in spec.shape) for i in range(3))
        return ProfileRecord(input=spec.name, min=low, opt=opt, max=top)

    is_open = [spec for spec in source.summary.inputs if any(isinstance(size, str) for size in spec.shape)]
    return [profile(spec) for spec in is_open]


@contextlib.contextmanager
def configurations(opened: TensorRTLibrary, definition: Any) -> Iterator[dict[str, Any]]:
    """What the builder was really told: read from the configuration that it gets."""
    trt, shown = opened.trt, {"sizes": []}
    recipe, add = network._configuration, trt.IBuilderConfig.add_optimization_profile

    def added(config: Any, profile: Any) -> int:
        """Batch and length, smallest, best and largest; nothing for fixed sizes."""
        shapes = profile.get_shape(definition.get_input(0).name)
        shown["sizes"] = [list(shape)[:2] for shape in shapes] if -1 in definition.get_input(0).shape else []
        return add(config, profile)

    def watched(*arguments: Any) -> Any:
        make = recipe(*arguments)

        def made(builder: Any, definition: Any) -> Any:
            config = make(builder, definition)
            shown.update(
                workspace=config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE),
                level=config.builder_optimization_level,
                profiles=config.num_optimization_profiles,
                verbosity=str(config.profiling_verbosity).rpartition(".")[2],
                tf32=config.get_flag(trt.BuilderFlag.TF32),
                monitored=config.progress_monitor is not None,
            )
            return config

        return made

    watching = mock.patch.object(network, "_configuration", watched)
    with watching, mock.patch.object(trt.IBuilderConfig, "add_optimization_profile", added):
        yield shown


def cancelled(opened: TensorRTLibrary, parsed: Any, asked: BuildRequest, profiles: list[ProfileRecord]) -> bool:
    """Whether Ctrl-C at the first line of progress ends the build."""

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    try:
        network.build(opened, parsed, asked, [], profiles, interrupt)
    except KeyboardInterrupt:
        return True
    return False


def kinds(opened: TensorRTLibrary, path: Path, library: Library) -> dict[str, Any]:
    """What the builder's configuration has of the options for special engines; they are built on a GPU alone."""
    trt, source = opened.trt, read_source(path)
    asked = BuildRequest(
        path, path.with_suffix(".engine"), "tensorrt", plugin=PluginChoice("library", library=library),
        version_compatible=True, hardware_compatible="ampere-plus", refit=True, strip_weights=True, embed_plugin=True,
    )  # fmt: skip
    parsed = network.parse(opened, source, "none", [])
    # TensorRT-RTX, which stands below, keeps no level.
    levels: list[Any] = []
    kept = property(lambda config: levels[-1], lambda config, level: levels.append(level))
    with mock.patch.object(trt.IBuilderConfig, "hardware_compatibility_level", kept):
        config = network._configuration(opened, asked, [], [], None, None)(parsed.builder, parsed.definition)
    flags = ("VERSION_COMPATIBLE", "REFIT", "STRIP_PLAN")
    library_bytes = Path(library.image).read_bytes()
    return {
        "flags": [name for name in flags if config.get_flag(getattr(trt.BuilderFlag, name))],
        "levels": [str(level).rpartition(".")[2] for level in levels],
        "plugins": [Path(name).read_bytes() == library_bytes for name in config.plugins_to_serialize],
    }


def stripped(opened: TensorRTLibrary, path: Path, library: Library) -> list[Any]:
    """How a file is taken without its functions, as releases before 10.7 must get it."""
    source = read_source(path)
    with loaded_plugin(opened, library), mock.patch.dict(FEATURES, plugin_before_function={}):
        try:
            parsed = network.parse(opened, source, "library", registered_op_types(opened))
        except LocalAttnError as error:
            return [type(error).__name__, error.why]
        checks = check_network(opened, parsed.definition, source, source.nodes(registered_op_types(opened)))
        return [check.status for check in checks]


def command(*words: object) -> list[Any]:
    """A command as users call it: its exit code, and what it printed."""
    from localattn import cli

    out, said = io.StringIO(), io.StringIO()
    arguments = ["localattn", *map(str, words)]
    with mock.patch.object(sys, "argv", arguments), contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            cli.main()
        except SystemExit as ended:
            return [ended.code, out.getvalue(), said.getvalue()]
    return [0, out.getvalue(), said.getvalue()]


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
