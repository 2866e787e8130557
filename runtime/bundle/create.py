"""Making a bundle: judge what goes in, draw samples, lay all out in a staged folder, then put it in its place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...core.documents.sidecar import sidecar_path
from ...core.errors import UsageError
from ...core.storage import library_image
from ...core.storage.file_kinds import BUNDLE, TAR
from ...core.storage.files import sha256
from ...core.storage.outputs import Output, writing
from ...core.tensors import TensorSpec
from ...core.tolerance import Tolerance
from ..inputs.arrays import save_arrays
from . import device
from .archive import copy_file, write_tar
from .device.check_files import MANIFEST, parse_manifest, path_problem
from .parts import (
    EnginePart,
    ModelPart,
    PluginPart,
    engine_tolerance,
    read_engine_part,
    read_model_part,
    read_plugin_part,
)
from .place import check_bundle, put_folder
from .readme import readme_text
from .repository import Repository
from .samples import Sample, make_samples
from .triton import Serving

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BundleRequest:
    """What to bundle and where to.

    Args:
        model: the ONNX file; of a step graph its prefill file comes along.
        output: a folder, or a tar if `as_tar`.
        as_tar: one deterministic tar instead of a folder.
        samples: samples to draw for each model, ≥ 0.
        seed: of the first sample.
        load_inputs: `.npz` files to take as samples instead.
        plugins: plugin libraries.
        engines: engines built from `model`.
        triton: how a Triton server may run it; None writes no model repository.
        atol: replaces the tolerance's absolute part.
        rtol: replaces its relative part.
        overwrite: an earlier bundle at `output` may be replaced.
    """

    model: Path
    output: Path
    as_tar: bool = False
    samples: int = 2
    seed: int = 0
    load_inputs: tuple[Path, ...] = ()
    plugins: tuple[Path, ...] = ()
    engines: tuple[Path, ...] = ()
    triton: Serving | None = None
    atol: float | None = None
    rtol: float | None = None
    overwrite: bool = False

    @property
    def inputs(self) -> list[Path]:
        """The files that are read, besides those beside them."""
        return [self.model, *self.load_inputs, *self.plugins, *self.engines]


@dataclass(frozen=True)
class BundleFacts:
    """What was written.

    Args:
        path: the folder or tar.
        manifest: as in `manifest.json`.
        manifest_sha256: what a device can be told to expect.
        notes: what the user should know of it.
    """

    path: Path
    manifest: dict[str, Any]
    manifest_sha256: str
    notes: list[str] = field(default_factory=list)


def create_bundle(request: BundleRequest, progress: Progress = lambda _: None) -> BundleFacts:
    """Write a bundle, whole or not at all.

    Raises:
        UsageError: the target or one of the files cannot be used.
        CheckFailed: a file was altered after its sidecar was written, or a sample gives NaN.
        MissingDependency: onnxruntime is needed for the samples and is not installed.
    """
    kind = TAR if request.as_tar else BUNDLE
    with writing(Output(request.output, kind), inputs=request.inputs, overwrite=request.overwrite) as work:
        check_bundle(request.output, as_tar=request.as_tar, overwrite=request.overwrite)
        progress("Reading the model")
        models = _read_models(request.model)
        plugins = [read_plugin_part(path) for path in request.plugins]
        engines = [read_engine_part(path, models[0], plugins) for path in request.engines]
        folder = work / "bundle"
        folder.mkdir()
        layout = _Layout(folder, request, models, plugins, engines)
        layout.write(progress)
        manifest = layout.manifest()
        text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        parse_manifest(text)  # a bundle that a device would refuse is refused here
        (folder / MANIFEST).write_bytes(text)
        progress("Writing it to the disk")
        if request.as_tar:
            write_tar(folder, request.output, layout.name)
        else:
            put_folder(folder, request.output)
    return BundleFacts(request.output, manifest, hashlib.sha256(text).hexdigest(), layout.notes)


def _read_models(path: Path) -> list[ModelPart]:
    """The model, and the prefill file of a step graph."""
    models = [read_model_part(path)]
    step = models[0].sidecar.step if models[0].sidecar else None
    if step is not None and step.prefill is not None:
        if path_problem(step.prefill) or "/" in step.prefill:
            raise UsageError(f"The sidecar of {path} names the prefill file {step.prefill[:100]!r}.")
        models.append(read_model_part(path.with_name(step.prefill)))
    return models


class _Layout:
    """The files of one bundle as they are written, and what the manifest says of them."""

    def __init__(
        self,
        folder: Path,
        request: BundleRequest,
        models: list[ModelPart],
        plugins: list[PluginPart],
        engines: list[EnginePart],
    ) -> None:
        self.folder, self.request = folder, request
        self.models, self.plugins, self.engines = models, plugins, engines
        self.name = request.model.stem
        self.notes: list[str] = []
        self._roles: dict[str, str] = {}
        self._models: list[dict[str, Any]] = []
        self._samples: list[dict[str, str]] = []
        self._served: list[str] = []

    def write(self, progress: Progress) -> None:
        """Every file but the manifest."""
        repository = Repository(self, self.request.triton, self.models[0], self.name) if self.request.triton else None
        home = repository.home if repository else "model"
        for part in self.models:
            self._take_model(part, home)
            progress(f"Running samples of {part.path.name}")
            given = self.request.load_inputs if part is self.models[0] else ()
            self._write_samples(part, make_samples(part, self.request.samples, self.request.seed, given), home)
        for plugin in self.plugins:
            self.take(plugin.path, plugin.home, plugin.kind)
            if sidecar_path(plugin.path).is_file():
                self.take(sidecar_path(plugin.path), str(sidecar_path(Path(plugin.home))), "sidecar")
        for engine in self.engines:
            self._take_engine(engine, home, repository)
        if repository:
            repository.write_model()
            self._served, self.notes = repository.served, repository.notes
        for source in (*sorted(Path(device.__file__).parent.glob("*.py")), Path(library_image.__file__)):
            if source.name != "__init__.py":
                self.take(source, source.name, "script")
        if self.models[0].sidecar and self.models[0].sidecar.step:
            path = f"{home}/{self.models[0].path.name}"
            self.notes.append(f"{path} is a step graph: `localattn generate {path}` goes on from a prompt.")
        self.add("README.md", readme_text(self.manifest(), self.notes, self._served).encode(), "readme")

    def take(self, source: Path, path: str, role: str) -> None:
        """Copy a file in."""
        if path in self._roles:
            if sha256(source) == sha256(self.folder / path):
                return  # the weights that two models share
            raise UsageError(f"Two files of the bundle would be called {path}.", fix="Rename one of them.")
        copy_file(source, self.folder / path)
        self._roles[path] = role

    def add(self, path: str, content: bytes, role: str) -> None:
        """Write a file that is made here."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        self._roles[path] = role

    def _take_model(self, part: ModelPart, home: str) -> None:
        roles = {part.path: "model", **dict.fromkeys(part.data, "data")}
        for source in part.files:
            place = f"{home}/{source.name}"
            if source == part.path and isinstance(part.file.content, bytes):
                self.add(place, part.file.content, "model")
            else:
                self.take(source, place, roles.get(source, "sidecar"))
        part.file.check_same()
        path = f"{home}/{part.path.name}"
        tolerance = part.tolerance(self.request.atol, self.request.rtol)
        kernels = [plugin.home for plugin in self.plugins if plugin.kind == "kernels"]
        entry = _model_entry(path, "onnx", path, tolerance, part.inputs, part.outputs)
        self._models.append(entry | {"plugins": kernels})

    def _write_samples(self, part: ModelPart, samples: list[Sample], home: str) -> None:
        for index, sample in enumerate(samples):
            paths = [f"samples/{part.path.stem}.{index}.{side}.npz" for side in ("inputs", "outputs")]
            for path, arrays in zip(paths, (sample.inputs, sample.outputs), strict=True):
                (self.folder / path).parent.mkdir(exist_ok=True)
                save_arrays(self.folder / path, arrays)
                self._roles[path] = "sample"
            model = f"{home}/{part.path.name}"
            self._samples.append({"model": model, "inputs": paths[0], "outputs": paths[1], "source": sample.source})

    def _take_engine(self, part: EnginePart, home: str, repository: Repository | None) -> None:
        facts = part.facts
        path = repository.engine_home(part) if repository else "engines"
        path = f"{path}/{part.path.name}"
        self.take(part.path, path, "engine")
        self.take(sidecar_path(part.path), f"{path}.json", "sidecar")
        tolerance = engine_tolerance(part, self.request.atol, self.request.rtol)
        entry = _model_entry(
            path, "engine", f"{home}/{self.models[0].path.name}", tolerance, facts.inputs, facts.outputs
        )
        needed = facts.plugin.sha256 if facts.plugin and facts.plugin.kind == "library" else ""
        entry |= {
            "backend": facts.backend,
            "backend_version": facts.library_version,
            "compute_capability": ",".join(map(_dotted, facts.targets)),
            "plugins": [plugin.home for plugin in self.plugins if plugin.digest == needed],
        }
        self._models.append(entry)

    def manifest(self) -> dict[str, Any]:
        """The manifest of the files written so far, in an order that depends on nothing else."""
        from ... import __version__

        files = [
            {
                "path": path,
                "size": (self.folder / path).stat().st_size,
                "sha256": sha256(self.folder / path),
                "role": role,
            }
            for path, role in sorted(self._roles.items())
        ]
        return {
            "format": "localattn-bundle",
            "format_version": 1,
            "name": self.name,
            "localattn": __version__,
            "models": self._models,
            "samples": self._samples,
            "files": files,
        }


def _model_entry(
    path: str, kind: str, samples_of: str, tolerance: Tolerance, inputs: list[TensorSpec], outputs: list[TensorSpec]
) -> dict[str, Any]:
    return {
        "path": path,
        "kind": kind,
        "samples_of": samples_of,
        "tolerance": asdict(tolerance),
        "inputs": [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in inputs],
        "outputs": [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in outputs],
        "backend": "onnxruntime",
        "backend_version": "",
        "compute_capability": "",
        "plugins": [],
    }


def _dotted(target: str) -> str:
    """`sm_87` → `8.7`."""
    digits = target.removeprefix("sm_")
    return f"{digits[:-1]}.{digits[-1]}" if digits.isdigit() and len(digits) > 1 else target
