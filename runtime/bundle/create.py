"""Make a bundle: check its files, draw samples, write everything to a temporary folder, then move it into place."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ...core import closeness
from ...core.documents.sidecar import sidecar_path
from ...core.dtypes import NUMPY_NAME
from ...core.errors import UsageError
from ...core.progress import timed_steps
from ...core.storage import library_image
from ...core.storage.accompanying_files import ACCOMPANYING_FILES
from ...core.storage.file_kinds import BUNDLE, TAR
from ...core.storage.outputs import Output, writing
from ...core.tensors import TensorSpec
from ...core.tolerance import tolerance_for
from ...core.versions import package_version
from ...onnx_graph import judgement, wire_model
from ...onnx_graph.onnx_file import OnnxFile
from ..generation.tokenizer import TOKENIZER
from ..inputs.arrays import save_arrays
from . import device
from .archive import write_tar
from .device.check_files import MANIFEST, Fault, parse_manifest, path_problem
from .parts import EnginePart, ModelPart, PluginPart, read_engine_part, read_model_part, read_plugin_part
from .place import BundleFiles, check_bundle, put_folder
from .readme import readme_text
from .repository import Repository
from .samples import Sample, make_samples, sequence_inputs
from .triton import Serving
from .web_page import HOME, MODELS, check_web_model, read_web_version, write_page

_log = logging.getLogger(__name__)

Progress = Callable[[str], None]
# Cosine floor for models whose outputs are all below the absolute tolerance, which would accept zeros.
_LEAST_COSINE = 0.999
# The size limit of `tokenizer.json` (docs/robustness.md).
_LARGEST_FILE = 128 << 20


@dataclass(frozen=True)
class BundleRequest:
    """A request for a bundle: what to include, and where to write it.

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
        """The files and folders to read, without their sidecars and weights."""
        web = [] if self.onnxruntime_web is None else [self.onnxruntime_web]
        return [self.model, *self.load_inputs, *self.plugins, *self.engines, *web]


@dataclass(frozen=True, repr=False)
class CreatedBundle:
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

    def __repr__(self) -> str:
        """Return the bundle in one line."""
        return f"<{self.path}: {len(self.manifest['files']) + 1} files, manifest SHA-256 {self.manifest_sha256}>"


@timed_steps(_log)
def create_bundle(request: BundleRequest, progress: Progress = lambda _: None) -> CreatedBundle:
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
        text = json.dumps(manifest, indent=1, allow_nan=False).encode() + b"\n"
        try:
            parse_manifest(text)  # refuse models that a device would refuse
        except Fault as fault:
            fix = "Give that file another name."
            raise UsageError(f"A device would refuse a bundle of {request.model}.", why=fault.why, fix=fix) from fault
        (folder / MANIFEST).write_bytes(text)
        progress("Writing it to the disk")
        if request.as_tar:
            write_tar(folder, request.output, layout.name)
        else:
            put_folder(folder, request.output)
    return CreatedBundle(request.output, manifest, hashlib.sha256(text).hexdigest(), layout.notes)


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
            "A bundle is either for Triton or for the web.",
            why="A bundle contains the model once, in the place that Triton or the page needs.",
            fix="Make two bundles.",
        )
    check_web_model(model)
    return read_web_version(request.onnxruntime_web)


def _is_of_text(model: ModelPart) -> bool:
    """Return whether a model is one of Hugging Face, or has a tokenizer beside it."""
    sidecar = model.sidecar
    hugging_face = sidecar is not None and "architecture" in sidecar.kwargs
    return hugging_face or (model.path.parent / TOKENIZER).is_file()


def _name_of(model: ModelPart) -> str:
    """Return the name of a bundle: the file's; of a Hugging Face model, whose files are all alike, its folder's."""
    named = model.path.absolute().parent.name
    if model.sidecar is not None and "architecture" in model.sidecar.kwargs:
        named = model.sidecar.checkpoint_name or named
    generic = model.path.stem in ("model", "model_step", "model_prefill") and _is_of_text(model)
    return named if generic and named and not path_problem(named) and "/" not in named else model.path.stem


class _Layout:
    """The files of one bundle as they are written, and their manifest entries.

    Args:
        folder: to write to.
        request: what was asked for.
        models: the model, and the prefill file of a step file.
        plugins: libraries to take along.
        engines: engines built from the model.
        web: version of the runtime for a web page; None writes no page.
    """

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
        self.name = _name_of(models[0])
        self.notes: list[str] = []
        self._repository: Repository | None = None
        self._home = "model" if web is None else MODELS
        if request.triton:
            self._repository = Repository(self.files, request.triton, models, self.name, plugins)
            self._home, self.notes = self._repository.home, self._repository.notes
        self._models: list[dict[str, Any]] = []
        self._samples: list[dict[str, str]] = []

    def write(self, progress: Progress) -> None:
        """Write every file except the manifest."""
        repository, first = self._repository, self.models[0]
        for part in self.models:
            self._take_model(part)
            progress(f"Running samples of {part.path.name}")
            samples = self._write_samples(part)
            self._judge_by_samples(self._models[-1], samples)
            if repository and part is first:
                progress("Testing whether a server may join requests")
                repository.write_model(samples)
        for plugin in self.plugins:
            self._take_plugin(plugin)
        for engine in self.engines:
            self._take_engine(engine)
        if self.web is not None:
            self._write_page(self.web)
        self._take_scripts()
        if first.step and first.step.mode == "step":
            path = self._place(first)
            self.notes.append(f"{path} is a step file: `localattn generate {path}` continues a prompt.")
        served = repository.served if repository else []
        self.files.add("README.md", readme_text(self.manifest(), self.notes, served, self.web).encode(), "readme")

    def _place(self, part: ModelPart) -> str:
        """Return the path of a model in the bundle."""
        return f"{self._home}/{part.path.name}"

    def _take_model(self, part: ModelPart) -> None:
        roles = {part.path: "model", **dict.fromkeys(part.data, "data")}
        # onnxruntime by itself reads shapes, for example, in no other file. A sidecar belongs to the file as it is.
        changed = part.file.with_small_data() if part.sidecar is None else None
        read = part.file.locations if changed is None else OnnxFile.of_bytes(changed).locations
        for source in part.files:
            place = f"{self._home}/{source.name}"
            if source == part.path and part.file.original is not None:
                self.files.add(place, part.file.original if changed is None else changed, "model")
            elif roles.get(source) != "data" or any(source.name == PurePosixPath(name).name for name in read):
                self.files.take(source, place, roles.get(source, "sidecar"))
        part.file.check_same()
        if part is self.models[0]:
            self._take_accompanying_files(part.path.parent)
        self._models.append(
            {
                "path": self._place(part),
                "kind": "onnx",
                "samples_of": self._place(part),
                "tolerance": self._tolerance(part.dtype),
                "inputs": _described(part.inputs),
                "outputs": _described(part.outputs),
                "backend": "onnxruntime",
                "backend_version": "",
                "compute_capability": "",
                "plugins": [plugin.home for plugin in self.plugins if plugin.kind == "kernels"],
            }
        )

    def _take_accompanying_files(self, folder: Path) -> None:
        """Take along what belongs to a model of text: tokenizer, chat template, settings of generation."""
        if not _is_of_text(self.models[0]):
            return
        for name in ACCOMPANYING_FILES:
            source = folder / name
            if source.is_file() and not source.is_symlink() and source.stat().st_size <= _LARGEST_FILE:
                self.files.take(source, f"{self._home}/{name}", "tokenizer")

    def _tolerance(self, dtype: str) -> dict[str, float | None]:
        """Return the tolerance for a device's outputs, for a model of this element type."""
        tolerance = tolerance_for(dtype, self.request.atol, self.request.rtol)
        return {"atol": tolerance.atol, "rtol": tolerance.rtol, "cosine": tolerance.cosine}

    def _judge_by_samples(self, model: dict[str, Any], samples: Sequence[Sample]) -> None:
        """Also set a cosine floor if all outputs are below the absolute tolerance; note samples that prove nothing."""
        if not samples:
            return
        bounds = model["tolerance"]

        def nothing() -> list[str]:
            outputs = [array for sample in samples for array in sample.outputs.values()]
            figures = [closeness.measure(x, x, bounds["atol"], bounds["rtol"]) for x in outputs]
            return [closeness.proves_nothing(x, bounds["atol"], bounds["rtol"], bounds["cosine"]) for x in figures]

        if all(nothing()) and self.request.atol is None and self.request.rtol is None:
            bounds["cosine"] = bounds["cosine"] or _LEAST_COSINE
        reasons = nothing()
        if all(reasons):
            why = reasons[0] if reasons else "it has no outputs"
            self.notes.append(
                f"the samples of {model['path']} prove nothing, so a check of the bundle will fail: {why}"
            )

    def _write_samples(self, part: ModelPart) -> list[Sample]:
        """Run samples of a model and write them; those of a step file also as the sequence they are drawn from."""
        request = self.request
        given = request.load_inputs if part is self.models[0] else ()
        samples = make_samples(part, request.samples, request.seed, given)
        for index, sample in enumerate(samples):
            inputs = f"samples/{part.path.stem}.{index}.inputs.npz"
            outputs = f"samples/{part.path.stem}.{index}.outputs.npz"
            save_arrays(self.files.new(inputs, "sample"), sample.inputs)
            save_arrays(self.files.new(outputs, "sample"), sample.outputs)
            entry = {"model": self._place(part), "inputs": inputs, "outputs": outputs, "source": sample.source}
            self._samples.append(entry)
        if not given and (sequence := sequence_inputs(part, samples, request.seed)):
            save_arrays(self.files.new(f"samples/{part.path.stem}.sequence.npz", "sample"), sequence)
        return samples

    def _take_plugin(self, plugin: PluginPart) -> None:
        self.files.take(plugin.path, plugin.home, plugin.kind)
        if sidecar_path(plugin.path).is_file():
            self.files.take(sidecar_path(plugin.path), str(sidecar_path(Path(plugin.home))), "sidecar")

    def _take_engine(self, part: EnginePart) -> None:
        sidecar = part.sidecar
        home = self._repository.engine_home(part) if self._repository else "engines"
        path = f"{home}/{part.path.name}"
        self.files.take(part.path, path, "engine")
        self.files.take(sidecar_path(part.path), f"{path}.json", "sidecar")
        self._models.append(
            {
                "path": path,
                "kind": "engine",
                "samples_of": self._place(self.models[0]),
                "tolerance": self._tolerance(sidecar.dtype if sidecar.dtype in NUMPY_NAME else "fp32"),
                "inputs": _described(sidecar.inputs),
                "outputs": _described(sidecar.outputs),
                "backend": sidecar.backend,
                "backend_version": sidecar.library_version,
                "compute_capability": ",".join(map(_dotted, sidecar.targets)),
                "plugins": [plugin.home for plugin in self.plugins if plugin.digest == part.plugin_digest],
            }
        )

    def _write_page(self, version: str) -> None:
        assert self.request.onnxruntime_web is not None
        write_page(self.files, self.request.onnxruntime_web, version, self.models)
        self.notes.append(
            f"{HOME}/ is a page that runs the model in a browser: python3 -m http.server --directory {HOME}"
        )

    def _take_scripts(self) -> None:
        """Add the scripts that check the bundle on a device."""
        shared = (Path(module.__file__ or "") for module in (closeness, library_image, judgement, wire_model))
        for source in (*sorted(Path(device.__file__).parent.glob("*.py")), *shared):
            if source.name != "__init__.py":
                self.files.take(source, source.name, "script")

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the files written so far, in a fixed order."""
        return {
            "format": "localattn-bundle",
            "format_version": 1,
            "name": self.name,
            "localattn": package_version(),
            "models": self._models,
            "samples": self._samples,
            "files": self.files.listed(),
        }


def _described(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    """Describe inputs or outputs for the manifest."""
    return [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in specs]


def _dotted(target: str) -> str:
    """Write a target as a compute capability: `sm_87` → `8.7`."""
    digits = target.removeprefix("sm_")
    return f"{digits[:-1]}.{digits[-1]}" if digits.isdigit() and len(digits) > 1 else target
