"""Define the schema of `model.engine.json`, the sidecar of every engine.

Nothing is written into the engine itself: any tool that runs TensorRT engines takes it as it is. What must hold before
an engine may be opened (library version, GPU, plugin library) is read from here, because TensorRT reports a mismatch
late and in its log only. Importing this module imports pydantic: light modules import it inside functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ..errors import UsageError
from ..storage.publishing import MAX_BYTES
from ..storage.reading import read_plain
from .schema import Record
from .sidecar import CheckRecord, Sidecar, TensorSpec, parse_sidecar, sidecar_path


class KernelName(Record):
    """One compiled kernel of a plugin library: element type ("fp16"), head size, and its optional inputs."""

    dtype: str
    head_dim: int
    has_mask: bool = False
    has_bias: bool = False
    has_xpos: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    has_shared_qk: bool = False
    node: str = "attention"
    causal: bool = False


class PluginRecord(Record):
    """How the attention nodes became plugins.

    Args:
        kind: `library`: a shared library that the runtime must load; `aot`: kernels inside the engine.
        path: the library as it lay at build time, for people: it is never opened from there; "" without one.
        sha256: of the library; "" without one.
        layers: names of the layers it computes.
        kernels: those that the layers need of the library.
    """

    kind: Literal["library", "aot"]
    path: str = ""
    sha256: str = ""
    layers: list[str] = Field(default_factory=list)
    kernels: list[KernelName] = Field(default_factory=list)


class ProfileRecord(Record):
    """The range of sizes of one input with dynamic axes, in one of the engine's optimization profiles."""

    profile: int = 0
    input: str
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


class BuildOptions(Record):
    """The options given to the builder.

    Args:
        plugin: what was asked for: auto, library, aot or none.
        builder_optimization_level: 0 to 5; None left it to the library.
        workspace: bytes of scratch memory a layer may use; None left it to the library.
        timing_cache: file of measured kernel times that was read and extended; None without one.
        profiles: sizes of the dynamic axes, empty for static shapes.
        version_compatible: later releases of TensorRT run it too; it holds code for that.
        hardware_compatible: "ampere-plus" or "same-capability": other GPUs run it too; None: only those in `targets`.
        refit: its weights can be replaced.
        strip_weights: it has no weights, and runs only after they were added.
        embed_plugin: it holds the plugin library.
    """

    plugin: str
    builder_optimization_level: int | None = None
    workspace: int | None = None
    timing_cache: str | None = None
    profiles: list[ProfileRecord] = Field(default_factory=list)
    version_compatible: bool = False
    hardware_compatible: Literal["ampere-plus", "same-capability"] | None = None
    refit: bool = False
    strip_weights: bool = False
    embed_plugin: bool = False


class EngineSidecar(Record):
    """The sidecar of an engine.

    Args:
        format: always "localattn-engine".
        format_version: 1; a reader refuses other versions.
        backend: the library that built it and runs it.
        library_version: its full version; no other runs the engine.
        targets: GPUs it runs on, as "sm_86".
        platform: operating system and processor, as "linux-x86_64".
        device: name of the GPU that built it; "" where it was built without one.
        dtype: element type of weights and products, as in the ONNX file.
        inputs: inputs in order.
        outputs: outputs in order.
        plugin: how the attention nodes became plugins; None where their ONNX function was built.
        options: the options given to the builder.
        onnx_name: file name of the ONNX file it was built from.
        onnx_sha256: SHA-256 of that file, without external data.
        engine_sha256: SHA-256 of the engine.
        engine_bytes: its size.
        seconds: how long the build took.
        versions: release of each package that took part.
        created: time of the build, ISO 8601.
        checks: what was checked after the build.
        model: the sidecar of the ONNX file; None if it had none.
    """

    format: Literal["localattn-engine"] = "localattn-engine"
    format_version: Literal[1] = 1
    backend: Literal["tensorrt", "tensorrt-rtx"]
    library_version: str
    targets: list[str] = Field(min_length=1)
    platform: str
    device: str = ""
    dtype: str
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    plugin: PluginRecord | None = None
    options: BuildOptions
    onnx_name: str
    onnx_sha256: str
    engine_sha256: str = Field(min_length=1)
    engine_bytes: int = Field(ge=1)
    seconds: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict)
    created: str
    checks: list[CheckRecord] = Field(default_factory=list)
    model: Sidecar | None = None


def read_engine_sidecar(engine: Path) -> EngineSidecar:
    """Read the sidecar of an engine.

    Raises:
        UsageError: there is no sidecar, or the file is not one; the first problem is named.
        CheckFailed: the sidecar was changed after it was written.
    """
    path = sidecar_path(engine)
    try:
        text = read_plain(path, MAX_BYTES)
    except OSError as error:
        why = "An engine needs its sidecar, which names its library, its GPU and its plugin."
        raise UsageError(
            f"Cannot read {path}.", why=why, fix="Copy the sidecar together with the engine, or build the engine again."
        ) from error
    what, fix = f"{path} does not describe an engine.", "Build the engine again with localattn build."
    return parse_sidecar(EngineSidecar, path, text, lambda why: UsageError(what, why=why, fix=fix))
