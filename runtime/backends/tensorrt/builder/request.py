"""Describe an engine to build, and the GPUs it can be built for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .....core.documents.engine_sidecar import BuildOptions, KernelName, ProfileRecord
from .....core.error_texts import argument
from .....core.errors import UsageError
from .....core.storage.file_kinds import ENGINE, TIMING_CACHE
from .....core.storage.library_store import Library
from .....core.storage.outputs import Output
from .....onnx_graph.onnx_file import OnnxFile
from ..device import Device
from ..library import TensorRTLibrary

# Users' names of GPU series, and their compute capabilities.
SERIES = {"rtx20": 75, "rtx30": 86, "rtx40": 89, "rtx50": 120}

# The default targets of TensorRT-RTX without a GPU: the desktop GPUs it is made for.
DEFAULT_TARGETS = (86, 89, 120)


@dataclass(frozen=True)
class PluginChoice:
    """How the attention nodes become plugins.

    Args:
        kind: `library`: through a shared library; `aot`: kernels inside the engine; `none`: by the ONNX function.
        library: the shared library, with `library`.
        register: registers the ahead-of-time plugins with TensorRT, with `aot`.
        op_types: those the plugins compute, with `aot`; a library lists its own.
        kernels: those that the model needs of the library.
        asked: the option as the user gave it ("auto" too), for the record.
    """

    kind: Literal["library", "aot", "none"] = "none"
    library: Library | None = None
    register: Callable[[], None] | None = None
    op_types: tuple[str, ...] = ()
    kernels: tuple[KernelName, ...] = ()
    asked: str = "none"


@dataclass(frozen=True)
class BuildRequest:
    """An engine to build.

    Args:
        model: the ONNX file, or its path; its external data is looked for beside it.
        output: the engine to write; its sidecar is the file beside it.
        backend: "tensorrt" or "tensorrt-rtx".
        targets: GPUs, as "rtx40" or "sm_89"; none means the GPU here, for RTX without a GPU those of `DEFAULT_TARGETS`.
        plugin: how the attention nodes become plugins.
        timing_cache: file of measured kernel times to read and extend.
        workspace: bytes of scratch memory a layer may use, ≥ 1.
        builder_optimization_level: 0 to 5; higher searches longer.
        profiles: sizes of inputs with dynamic axes.
        version_compatible: later releases of TensorRT shall run it too.
        hardware_compatible: "ampere-plus" or "same-capability": other GPUs shall run it too.
        refit: its weights can be replaced.
        strip_weights: leave its weights out.
        embed_plugin: put the plugin library into it.
        overwrite: replace an existing engine.
        device: number of the GPU to build on, among those that the driver shows to this process.
    """

    model: Path | OnnxFile
    output: Path
    backend: Literal["tensorrt", "tensorrt-rtx"]
    targets: Sequence[str] = ()
    plugin: PluginChoice = PluginChoice()
    timing_cache: Path | None = None
    workspace: int | None = None
    builder_optimization_level: int | None = None
    profiles: Sequence[ProfileRecord] = field(default_factory=tuple)
    version_compatible: bool = False
    hardware_compatible: Literal["ampere-plus", "same-capability"] | None = None
    refit: bool = False
    strip_weights: bool = False
    embed_plugin: bool = False
    overwrite: bool = False
    device: int = 0

    @property
    def outputs(self) -> list[Output]:
        """The files to write, the engine last; other builds may extend the timing cache meanwhile."""
        cache = [] if self.timing_cache is None else [Output(self.timing_cache, TIMING_CACHE)]
        return [*cache, Output(self.output, ENGINE)]

    @property
    def inputs(self) -> list[Path]:
        """The files to read; files beside them (sidecars, weights) are not listed."""
        library = self.plugin.library
        return [Path(self.model), *(() if library is None else (library.path,))]

    def options(self, profiles: Sequence[ProfileRecord]) -> BuildOptions:
        """Return the record of these options, with the sizes that the engine will take."""
        return BuildOptions(
            plugin=self.plugin.asked,
            builder_optimization_level=self.builder_optimization_level,
            workspace=self.workspace,
            timing_cache=None if self.timing_cache is None else str(self.timing_cache),
            profiles=list(profiles),
            version_compatible=self.version_compatible,
            hardware_compatible=self.hardware_compatible,
            refit=self.refit,
            strip_weights=self.strip_weights,
            embed_plugin=self.embed_plugin,
        )


def capability(target: str) -> int:
    """Return the compute capability of a target: "rtx40", "sm_89", "sm89", "8.9" and "89" are 89.

    Raises:
        UsageError: it is none of these.
    """
    text = target.strip().lower()
    if text in SERIES:
        return SERIES[text]
    digits = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)", text)
    if digits is None:
        raise UsageError(
            f"There is no GPU target {target!r}.",
            fix=f"Known: {', '.join(SERIES)}, or a compute capability as sm_89 or 8.9.",
        )
    return 10 * int(digits[1]) + int(digits[2])


def resolve_targets(opened: TensorRTLibrary, wanted: Sequence[str], device: Device | None) -> list[int]:
    """Return the compute capabilities to build for.

    Args:
        opened: the library that builds.
        wanted: the targets that the user named; none for the default.
        device: the GPU here; None without one.

    Raises:
        UsageError: the library cannot build for one of them here.
    """
    named = list(dict.fromkeys(capability(target) for target in wanted))
    if not opened.has("builds_without_gpu"):
        assert device is not None, "the caller has looked for it"
        if any(target != device.capability for target in named):
            others = ", ".join(f"sm_{target}" for target in named)
            raise UsageError(
                f"TensorRT cannot build for {others} here.",
                why=f"It builds for the GPU it runs on, which is {device.describe()}.",
                fix=f"Build on the target device, or use {argument('backend', 'tensorrt-rtx')} for an RTX GPU.",
            )
        return [device.capability]
    if not named:
        named = [device.capability] if device is not None else list(DEFAULT_TARGETS)
    listed = (re.fullmatch(r"SM(\d+)", name) for name in opened.trt.ComputeCapability.__members__)
    known = sorted(int(match[1]) for match in listed if match)
    unknown = [f"sm_{target}" for target in named if target not in known]
    if unknown:
        raise UsageError(
            f"{opened.library.name} {opened.version} does not build for {', '.join(unknown)}.",
            fix=f"It builds for {', '.join(f'sm_{target}' for target in known)}.",
        )
    return named
