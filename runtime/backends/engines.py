"""Describe engines: what is asked of a build, and what a build and an inspection answer.

Importing this module imports pydantic: light modules import it inside functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...core.documents.engine_sidecar import BuildOptions, EngineSidecar, KernelName, ProfileRecord
from ...core.documents.report import Report
from ...core.documents.sidecar import CheckRecord, sidecar_path
from ...core.renamed import RenamedAttribute
from ...core.storage.file_kinds import ENGINE, TIMING_CACHE
from ...core.storage.library_store import Library
from ...core.storage.outputs import Output
from ...onnx_graph.onnx_file import OnnxFile

# The new engine, the ONNX file, the plugin library and where to run → the record of a comparison of the two.
Compare = Callable[[Path, Path, Path | None, str], CheckRecord]


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
        model: the ONNX file, or its path; its external data is looked for next to it.
        output: the engine to write; its sidecar is the file next to it.
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
        """The files to read; files next to them (sidecars, weights) are not listed."""
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


@dataclass(frozen=True, repr=False)
class BuildReport(Report):
    """A finished build.

    Args:
        path: the engine.
        sidecar: what its sidecar says.
        notes: what the user should know.
    """

    path: Path
    sidecar: EngineSidecar
    notes: list[str]
    facts = RenamedAttribute("sidecar")

    @property
    def files(self) -> list[Path]:
        """The engine and its sidecar."""
        return [self.path, sidecar_path(self.path)]

    @property
    def checks(self) -> list[CheckRecord]:
        """The checks of the engine."""
        return self.sidecar.checks

    def headline(self) -> str:
        """Return the engine and its properties as one line."""
        return (
            f"{self.path}  {self.sidecar.backend} {self.sidecar.library_version} "
            f"for {', '.join(self.sidecar.targets)}, {self.sidecar.dtype}"
        )


@dataclass(frozen=True)
class EngineLayer:
    """One layer.

    Args:
        name: the builder's name, often of several nodes.
        kind: the inspector's "LayerType".
        nodes: the inspector's "Metadata", which names the ONNX nodes inside.
        types: numpy's names of the element types of its inputs and outputs.
    """

    name: str
    kind: str
    nodes: str = ""
    types: tuple[str, ...] = ()

    @property
    def is_plugin(self) -> bool:
        """Whether a plugin computes it."""
        return "plugin" in self.kind.lower()

    def computes(self, node: str) -> bool:
        """Return whether the ONNX node of this name is in it."""
        return f"[ONNX Layer: {node}]" in self.nodes or node in self.name.split(" + ") or self.name == node


@dataclass(frozen=True)
class EngineReport:
    """An engine file as it was found.

    Args:
        path: the file.
        sidecar: its sidecar.
        unchanged: whether it is the file that the sidecar describes.
        plugin_problem: why its plugin library would not load; "" if it would, or if it needs none.
        layers: its layers; None where it cannot be opened.
        why_closed: why it cannot be opened here; "" if it can.
        kernels: which machine code or PTX of its plugin library this GPU takes, a line a kernel; empty where it cannot
            be opened, or the kernels are not stated.
    """

    path: str
    sidecar: EngineSidecar
    unchanged: bool
    plugin_problem: str
    layers: list[EngineLayer] | None
    why_closed: str
    kernels: tuple[str, ...] = ()

    def layer_kinds(self) -> dict[str, int]:
        """Count the layers of each kind, most first."""
        return dict(Counter(layer.kind for layer in self.layers or []).most_common())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {
            "path": self.path,
            "unchanged": self.unchanged,
            "plugin_problem": self.plugin_problem,
            "why_closed": self.why_closed,
            "kernels": list(self.kernels),
            "layers": None if self.layers is None else [asdict(layer) for layer in self.layers],
            **self.sidecar.model_dump(mode="json", by_alias=True),
        }
