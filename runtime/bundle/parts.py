"""Read and check the parts of a bundle: models with their data, plugin libraries, engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.documents.sidecar import Sidecar, sidecar_path
from ...core.dtypes import SHORT_NAME
from ...core.error_texts import argument
from ...core.errors import CheckFailed, UsageError
from ...core.storage.files import sha256
from ...core.storage.library_store import TENSORRT_PLUGIN, kind_of
from ...core.storage.publishing import MAX_BYTES
from ...core.storage.reading import open_plain, read_plain
from ...core.tensors import TensorSpec
from ...onnx_graph.onnx_file import OnnxFile
from ..backends import registry
from .device.check_files import path_problem

if TYPE_CHECKING:
    from ...core.documents.engine_sidecar import EngineSidecar
    from ...core.documents.step_record import StepRecord

# Processors by the machine number in an ELF header (elf.h: EM_X86_64, EM_AARCH64).
_MACHINES = {62: "x86_64", 183: "aarch64"}
# Folders of libraries in a bundle, by their kind.
_HOMES = {"plugin": "plugins", "kernels": "kernels"}


@dataclass(frozen=True)
class ModelPart:
    """An ONNX file.

    Args:
        file: the file; its sidecar and data are in the same folder.
        inputs: its inputs.
        outputs: its outputs.
        data: its files of external weights.
        sidecar: its sidecar, or None if it has none.
        dtype: "fp32", "fp16" or "bf16", which chooses the tolerance.
    """

    file: OnnxFile
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    data: list[Path]
    sidecar: Sidecar | None
    dtype: str

    @property
    def path(self) -> Path:
        """The path of the file."""
        return Path(self.file)

    @property
    def files(self) -> list[Path]:
        """The file, its data and its sidecar."""
        return [self.path, *self.data, *([] if self.sidecar is None else [sidecar_path(self.path)])]

    @property
    def step(self) -> StepRecord | None:
        """How a step file is called; None for a file that needs whole sequences."""
        return self.sidecar.step if self.sidecar else None


@dataclass(frozen=True)
class PluginPart:
    """A library of compiled attention and the processor it is for.

    Args:
        path: of the library.
        arch: "x86_64" or "aarch64".
        digest: its SHA-256.
        kind: "plugin" for TensorRT, "kernels" for onnxruntime on the CPU; also its role in the manifest.
    """

    path: Path
    arch: str
    digest: str
    kind: str = "plugin"

    @property
    def home(self) -> str:
        """Its path in the bundle."""
        return f"{_HOMES[self.kind]}/{self.arch}/{self.path.name}"


@dataclass(frozen=True)
class EnginePart:
    """An engine with its sidecar."""

    path: Path
    sidecar: EngineSidecar

    @property
    def plugin_digest(self) -> str:
        """SHA-256 of the plugin library that it needs; "" if it needs none."""
        plugin = self.sidecar.plugin
        return plugin.sha256 if plugin and plugin.kind == "library" else ""


def read_model_part(path: Path) -> ModelPart:
    """Read an ONNX file that is complete and whose sidecar was written for it.

    Raises:
        UsageError: it is not an ONNX model, its data is missing or in another folder, or its sidecar is broken.
        CheckFailed: the file was altered after its sidecar was written.
    """
    from ...onnx_graph.summary import inspect_onnx

    backend = registry.of_file(path)
    if backend is None or backend.built:
        raise UsageError(
            f"Cannot bundle {path}.",
            why="A bundle needs a model.onnx.",
            fix=f"Give engines as {argument('engine')}.",
        )
    file = OnnxFile.read(path)
    summary = inspect_onnx(file)
    if summary.sidecar_matches is False:
        raise CheckFailed(
            f"{path} is not the file its sidecar was written for.",
            why="Its SHA-256 differs: one of the two was changed.",
            fix="Export the model again.",
        )
    for name in (path.name, *summary.external_data):
        problem = path_problem(name) or ("is in another folder" if "/" in name else "")
        if problem:
            fix = "Rename the file and its sidecar: a bundle is for any file system."
            if name != path.name:
                fix = "External data must be in the model's folder, under a plain name."
            raise UsageError(f"Cannot bundle {path}.", why=f"The name {name[:100]!r} {problem}.", fix=fix)
    if summary.missing_external_data:
        why = f"{summary.missing_external_data[0]} is missing in its folder."
        raise UsageError(f"{path} is incomplete.", why=why, fix="Copy the data file together with the model.")
    dtype = summary.sidecar.dtype if summary.sidecar else SHORT_NAME.get(summary.weight_dtype or "", "fp32")
    data = [path.with_name(name) for name in summary.external_data]
    return ModelPart(file, summary.inputs, summary.outputs, data, summary.sidecar, dtype)


def read_plugin_part(path: Path) -> PluginPart:
    """Read a library for Linux on x86-64 or aarch64: TensorRT plugins, or onnxruntime's kernels for the CPU.

    Raises:
        UsageError: it does not exist, or is not a shared library for a known processor.
        CheckFailed: it was changed after its sidecar was written.
    """
    import json

    try:
        with open_plain(path) as stream:
            header = stream.read(20)
        arch = _MACHINES.get(int.from_bytes(header[18:20], "little")) if header.startswith(b"\x7fELF") else None
        digest = sha256(path)
        entries = json.loads(read_plain(sidecar_path(path), MAX_BYTES)) if sidecar_path(path).is_file() else {}
    except OSError as error:
        raise UsageError(f"Cannot read {path}.", why=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{sidecar_path(path)} does not describe a library.", why="It is not JSON.") from error
    if arch is None:
        raise UsageError(f"{path} is not a plugin library.", why=f"Known: ELF for {', '.join(_MACHINES.values())}.")
    stated = entries.get("sha256") if isinstance(entries, dict) else None
    if stated not in (None, digest):
        why = "Its SHA-256 is not the one in its sidecar."
        raise CheckFailed(f"{path} was changed after it was written.", why=why, fix="Build it again.")
    return PluginPart(path, arch, digest, (kind_of(path) or TENSORRT_PLUGIN).name)


def read_engine_part(path: Path, model: ModelPart, plugins: Sequence[PluginPart]) -> EnginePart:
    """Read an engine that was built from `model` and whose plugin library is in the bundle.

    Raises:
        UsageError: it has no sidecar, belongs to another model, or its plugin library is not given.
        CheckFailed: it was changed after it was built.
    """
    from ...core.documents.engine_sidecar import read_engine_sidecar

    sidecar = read_engine_sidecar(path)
    try:
        digest = sha256(path)
    except OSError as error:
        raise UsageError(f"Cannot read {path}.", why=error.strerror or str(error)) from error
    if digest != sidecar.engine_sha256:
        why = "Its SHA-256 is not the one in its sidecar."
        raise CheckFailed(f"{path} was changed after it was written.", why=why, fix="Build it again.")
    if sidecar.onnx_sha256 != model.file.sha256:
        why = f"It was built from another file ({sidecar.onnx_name})."
        raise UsageError(f"{path} is not an engine of {model.path}.", why=why, fix="Build the engine from this file.")
    engine = EnginePart(path, sidecar)
    if engine.plugin_digest and engine.plugin_digest not in {plugin.digest for plugin in plugins}:
        why = f"It needs the library that it was built with, SHA-256 {engine.plugin_digest}."
        name = Path(sidecar.plugin.path).name if sidecar.plugin else ""
        raise UsageError(
            f"The plugin library of {path} is missing.", why=why, fix=f"Add {argument('plugin_library', name)}."
        )
    return engine
