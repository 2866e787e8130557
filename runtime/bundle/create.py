"""Make a bundle: check the files that go in, draw samples, write all to a staged folder, then move it into place."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core import closeness
from ...core.documents.sidecar import sidecar_path
from ...core.errors import UsageError
from ...core.progress import timed_steps
from ...core.storage import library_image
from ...core.storage.file_kinds import BUNDLE, TAR
from ...core.storage.outputs import Output, writing
from ...core.tolerance import TOLERANCES, tolerance_for
from ..inputs.arrays import save_arrays
from . import device
from .archive import write_tar
from .device.check_files import MANIFEST, parse_manifest, path_problem
from .parts import BundleFiles, EnginePart, ModelPart, PluginPart, read_engine_part, read_model_part, read_plugin_part
from .place import check_bundle, put_folder
from .readme import readme_text
from .repository import Repository
from .samples import Sample, make_samples, sequence_inputs
from .triton import Serving
from .web_page import HOME, MODELS, check_web_model, read_web_version, write_page

if TYPE_CHECKING:
    from ...core.documents.engine_facts import EngineFacts

_log = logging.getLogger(__name__)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BundleRequest:
    """What to bundle, and where to write it.

    Args:
        model: the ONNX file; with a step file its prefill file is bundled too.
        output: a folder, or a tar if `as_tar`.
        as_tar: one deterministic tar instead of a folder.
        samples: samples to draw for each model, ≥ 0.
        seed: of the first sample.
        load_inputs: `.npz` files to take as samples instead.
        plugins: plugin libraries.
        engines: engines built from `model`.
        triton: how a Triton server may run it; None writes no model repository.
        onnxruntime_web: the folder of npm's package, for a page that runs the model in a browser; None writes none.
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
    onnxruntime_web: Path | None = None
    atol: float | None = None
    rtol: float | None = None
    overwrite: bool = False

    @property
    def inputs(self) -> list[Path]:
        """The files and folders to read; files beside them (sidecars, weights) are not listed."""
        web = [] if self.onnxruntime_web is None else [self.onnxruntime_web]
        return [self.model, *self.load_inputs, *self.plugins, *self.engines, *web]


@dataclass(frozen=True)
class BundleFacts:
    """A written bundle.

    Args:
        path: the folder or tar.
        manifest: as in `manifest.json`.
        manifest_sha256: SHA-256 of the manifest, which `bundle verify` on a device can be given to expect.
        notes: what the user should know of it.
    """

    path: Path
    manifest: dict[str, Any]
    manifest_sha256: str
    notes: list[str] = field(default_factory=list)


@timed_steps(_log)
def create_bundle(request: BundleRequest, progress: Progress = lambda _: None) -> BundleFacts:
    """Write a bundle, whole or not at all.

    Raises:
        UsageError: the target or one of the files cannot be used, or both a Triton repository and a page are asked for.
        CheckFailed: a file was altered after its sidecar was written, or a sample gives NaN.
        MissingDependency: onnxruntime is needed for the samples and is not installed.
    """
    kind = TAR if request.as_tar else BUNDLE
    with writing(Output(request.output, kind), inputs=request.inputs, overwrite=request.overwrite) as work:
        check_bundle(request.output, as_tar=request.as_tar, overwrite=request.overwrite)
        progress("Reading the model")
        models = _read_models(request.model)
        web = _read_web(request, models[0])
        plugins = [read_plugin_part(path) for path in request.plugins]
        engines = [read_engine_part(path, models[0], plugins) for path in request.engines]
        folder = work / "bundle"
        folder.mkdir()
        layout = _Layout(folder, request, models, plugins, engines, web)
        layout.write(progress)
        manifest = layout.manifest()
        text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        parse_manifest(text)  # refuse here what a device would refuse
        (folder / MANIFEST).write_bytes(text)
        progress("Writing it to the disk")
        if request.as_tar:
            write_tar(folder, request.output, layout.name)
        else:
            put_folder(folder, request.output)
    return BundleFacts(request.output, manifest, hashlib.sha256(text).hexdigest(), layout.notes)


def _read_models(path: Path) -> list[ModelPart]:
    """Read the model, and the prefill file of a step file."""
    models = [read_model_part(path)]
    step = models[0].step
    if step is not None and step.prefill is not None:
        if path_problem(step.prefill) or "/" in step.prefill:
            raise UsageError(f"The sidecar of {path} names the prefill file {step.prefill[:100]!r}.")
        models.append(read_model_part(path.with_name(step.prefill)))
    return models


def _read_web(request: BundleRequest, model: ModelPart) -> str | None:
    """Return the version of the runtime for a web page, if one is asked for and it can run the model."""
    if request.onnxruntime_web is None:
        return None
    if request.triton is not None:
        raise UsageError(
            "A bundle is for Triton or for the web.",
            why="The model lies in it once, where the one or the other finds it.",
            fix="Make two bundles.",
        )
    check_web_model(model)
    return read_web_version(request.onnxruntime_web)


class _Layout:
    """The files of one bundle as they are written, and their manifest entries."""

    def __init__(
        self,
        folder: Path,
        request: BundleRequest,
        models: list[ModelPart],
        plugins: list[PluginPart],
        engines: list[EnginePart],
        web: str | None,
    ) -> None:
        self.files, self.request = BundleFiles(folder), request
        self.models, self.plugins, self.engines, self.web = models, plugins, engines, web
        self.name = request.model.stem
        self.notes: list[str] = []
        self._home = "model" if web is None else MODELS
        self._models: list[dict[str, Any]] = []
        self._samples: list[dict[str, str]] = []

    def write(self, progress: Progress) -> None:
        """Write every file except the manifest."""
        request, files, first = self.request, self.files, self.models[0]
        repository = None
        if request.triton:
            repository = Repository(files, request.triton, self.models, self.name, self.plugins)
            self._home, self.notes = repository.home, repository.notes
        for part in self.models:
            self._take_model(part)
            progress(f"Running samples of {part.path.name}")
            given = request.load_inputs if part is first else ()
            drawn = make_samples(part, request.samples, request.seed, given)
            self._write_samples(part, drawn)
            if not given and (sequence := sequence_inputs(part, drawn, request.seed)):
                save_arrays(files.new(f"samples/{part.path.stem}.sequence.npz", "sample"), sequence)
            if repository and part is first:
                progress("Proving what a server may join")
                repository.write_model(drawn)
        for plugin in self.plugins:
            files.take(plugin.path, plugin.home, plugin.kind)
            if sidecar_path(plugin.path).is_file():
                files.take(sidecar_path(plugin.path), str(sidecar_path(Path(plugin.home))), "sidecar")
        for engine in self.engines:
            self._take_engine(engine, repository.engine_home(engine) if repository else "engines")
        if request.onnxruntime_web and self.web is not None:
            write_page(files, request.onnxruntime_web, self.web, self.models)
            self.notes.append(
                f"{HOME}/ is a page that runs the model in a browser: python3 -m http.server --directory {HOME}"
            )
        shared = (Path(module.__file__ or "") for module in (closeness, library_image))
        for source in (*sorted(Path(device.__file__).parent.glob("*.py")), *shared):
            if source.name != "__init__.py":
                files.take(source, source.name, "script")
        if first.step:
            path = self._place(first)
            self.notes.append(f"{path} is a step graph: `localattn generate {path}` goes on from a prompt.")
        readme = readme_text(self.manifest(), self.notes, repository.served if repository else [], self.web)
        files.add("README.md", readme.encode(), "readme")

    def _place(self, part: ModelPart) -> str:
        return f"{self._home}/{part.path.name}"

    def _take_model(self, part: ModelPart) -> None:
        roles = {part.path: "model", **dict.fromkeys(part.data, "data")}
        for source in part.files:
            place = f"{self._home}/{source.name}"
            if source == part.path and isinstance(part.file.content, bytes):
                self.files.add(place, part.file.content, "model")
            else:
                self.files.take(source, place, roles.get(source, "sidecar"))
        part.file.check_same()
        kernels = [plugin.home for plugin in self.plugins if plugin.kind == "kernels"]
        self._list(self._place(part), "onnx", part, part.dtype, samples_of=self._place(part), plugins=kernels)

    def _write_samples(self, part: ModelPart, samples: list[Sample]) -> None:
        for index, sample in enumerate(samples):
            paths = {side: f"samples/{part.path.stem}.{index}.{side}.npz" for side in ("inputs", "outputs")}
            for side, path in paths.items():
                save_arrays(self.files.new(path, "sample"), getattr(sample, side))
            self._samples.append({"model": self._place(part), **paths, "source": sample.source})

    def _take_engine(self, part: EnginePart, home: str) -> None:
        facts, path = part.facts, f"{home}/{part.path.name}"
        self.files.take(part.path, path, "engine")
        self.files.take(sidecar_path(part.path), f"{path}.json", "sidecar")
        needed = facts.plugin.sha256 if facts.plugin and facts.plugin.kind == "library" else ""
        self._list(
            path,
            "engine",
            facts,
            facts.dtype if facts.dtype in TOLERANCES else "fp32",
            samples_of=self._place(self.models[0]),
            backend=facts.backend,
            backend_version=facts.library_version,
            compute_capability=",".join(map(_dotted, facts.targets)),
            plugins=[plugin.home for plugin in self.plugins if plugin.digest == needed],
        )

    def _list(self, path: str, kind: str, facts: ModelPart | EngineFacts, dtype: str, **more: object) -> None:
        """Add a model to the manifest; its element type chooses how far a device's outputs may be from the samples'."""
        tolerance = tolerance_for(dtype, self.request.atol, self.request.rtol)
        entry = {
            "path": path,
            "kind": kind,
            "samples_of": "",
            "tolerance": {name: getattr(tolerance, name) for name in ("atol", "rtol", "cosine")},
            "inputs": [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in facts.inputs],
            "outputs": [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in facts.outputs],
            "backend": "onnxruntime",
            "backend_version": "",
            "compute_capability": "",
        }
        self._models.append(entry | more)

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the files written so far, in a fixed order."""
        from ... import __version__

        return {
            "format": "localattn-bundle",
            "format_version": 1,
            "name": self.name,
            "localattn": __version__,
            "models": self._models,
            "samples": self._samples,
            "files": self.files.listed(),
        }


def _dotted(target: str) -> str:
    """Write a target as a compute capability: `sm_87` → `8.7`."""
    digits = target.removeprefix("sm_")
    return f"{digits[:-1]}.{digits[-1]}" if digits.isdigit() and len(digits) > 1 else target
