"""The one way of every export: open → trace → lower → write → check → publish.

A job (`exporter/jobs/`) says what is particular to a checkpoint, to its step files, to a module or to a conversion. The
files are written to a temporary folder, checked there, and only then moved to their places, so that they appear whole
and checked, or not at all. An output is judged three times: before work begins, when its name is reserved, and before
the move (`core/storage/outputs.py`).
"""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Generic, TypeVar

import onnx_ir as ir

from ..core.documents.sidecar import CheckRecord, Sidecar
from ..core.machine.resident_memory import release_memory
from ..core.progress import timed_steps
from ..core.storage.files import sha256
from ..core.storage.outputs import Output, writing
from ..core.storage.publishing import publish_together
from .artifact.form import WrittenForm, written_form
from .artifact.publish import (
    drop_attention_functions,
    output_specs,
    package_versions,
    publish_models,
    save_model,
)
from .artifact.serialize import forget_weights
from .artifact.shared_weights import share_weights
from .checks.checked_file import CheckedFile
from .checks.model_checker import check_model
from .checks.table import run_checks
from .checks.verdict import demand
from .options import FileOptions

_log = logging.getLogger(__name__)

Progress = Callable[[str], None]
R = TypeVar("R")


@dataclass(frozen=True)
class Part:
    """One file of an export, on its way.

    Args:
        path: its final path.
        model: the traced model with its ONNX functions.
        nodes: its attention nodes.
        form: the model as it is written, once it is lowered.
        staged: the written file in the temporary folder.
        data: name of the file of weights next to it; None if there is none.
        checks: the records of its checks.
    """

    path: Path
    model: ir.Model
    nodes: Sequence[ir.Node] = ()
    form: WrittenForm | None = None
    staged: Path = Path()
    data: str | None = None
    checks: list[CheckRecord] = field(default_factory=list)

    @property
    def lowered(self) -> WrittenForm:
        """The model as it is written."""
        assert self.form is not None
        return self.form


class Job(ABC, Generic[R]):
    """What is particular to one kind of export; `R` is what it reports.

    Attributes:
        options: options of the files.
        mapped: the memory-mapped checkpoint, whose pages need not stay in memory.
        folder: the temporary folder of the export.
    """

    options: FileOptions
    folder: Path
    mapped: Path | None = None

    @property
    def precision(self) -> str:
        """The entry of `core.tolerance` with the files' tolerance."""
        return "fp32"

    @abstractmethod
    def outputs(self) -> list[Output]:
        """List the files to write, the requested one last."""

    @abstractmethod
    def inputs(self) -> Iterable[Path]:
        """List the files that are read, none of which is written over."""

    @abstractmethod
    def open(self, progress: Progress) -> None:
        """Read what is exported, and refuse what cannot succeed.

        Raises:
            UsageError: the request or one of its files cannot be used.
        """

    @abstractmethod
    def trace(self, progress: Progress) -> list[Part]:
        """Make the graph of each file, the requested one first.

        Raises:
            ExportFailed: a graph could not be made.
        """

    def lower(self, part: Part) -> WrittenForm:
        """Return a traced model in the form that the options ask for."""
        return written_form(part.model, part.nodes, self.options)

    def written(self) -> None:
        """Free what only the making of the files needed; their checks follow."""

    def external_data_from(self, model: ir.Model) -> int:
        """Return the size of the weights in bytes from which they go into a file of their own."""
        return self.options.external_data_from

    @abstractmethod
    def checked(self, part: Part, progress: Progress) -> CheckedFile:
        """Return a written file as its checks see it."""

    def sidecar(self, part: Part) -> Sidecar | None:
        """Return what is recorded about a checked file; None for nothing."""
        entries: dict[str, Any] = {
            "outputs": output_specs(part.lowered.model),
            "opset": self.options.opset,
            "windows": part.lowered.windows,
            "function_body": self.options.function_body,
            "standard_ops": self.options.standard_ops,
            "external_data": part.data,
            "versions": package_versions(),
            "model_sha256": sha256(part.staged),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "checks": part.checks,
        }
        return Sidecar(**entries, **self.sidecar_entries(part))

    def sidecar_entries(self, part: Part) -> Mapping[str, Any]:
        """Return what the sidecar records about the model."""
        return {}

    def published(self, folder: Path) -> None:
        """Do what follows when the files are in their places."""

    @abstractmethod
    def report(self, parts: Sequence[tuple[Part, Sidecar | None]]) -> R:
        """Tell what was written."""


@timed_steps(_log)
def run(job: Job[R], progress: Progress = lambda _: None) -> R:
    """Export, check and publish the files of a job.

    Args:
        job: what to export.
        progress: called with the name of each step as it begins.

    Raises:
        UsageError: the request or one of its files cannot be used.
        ExportFailed: a graph could not be made.
        CheckFailed: a check found a fault; nothing was written.
    """
    with writing(*job.outputs(), inputs=job.inputs(), overwrite=job.options.overwrite) as folder:
        job.folder = folder
        job.open(progress)
        parts = job.trace(progress)
        parts = [replace(part, form=job.lower(part)) for part in parts]
        parts = write(job, parts, folder)
        job.written()
        parts = [check(job, part, progress) for part in parts]
        parts = without_functions(job, parts, progress)
        return publish(job, parts, folder, progress)


def write(job: Job[Any], parts: Sequence[Part], folder: Path) -> list[Part]:
    """Save the models to the temporary folder; several have their weights in one file."""
    models = [part.lowered.model for part in parts]
    shared = share_weights(models, folder, parts[0].path.name) if len(parts) > 1 else None
    staged = [_saved(job, part, folder / part.path.name, shared) for part in parts]
    if job.options.function_body:
        for model in models:
            forget_weights(model)
    gc.collect()  # the traced program is full of cycles
    release_memory(job.mapped)
    return staged


def _saved(job: Job[Any], part: Part, staged: Path, shared: str | None) -> Part:
    model = part.lowered.model
    return replace(part, staged=staged, data=save_model(model, staged, job.external_data_from(model), shared))


def check(job: Job[Any], part: Part, progress: Progress) -> Part:
    """Run the checks of a written file (`checks/table.py`).

    Raises:
        CheckFailed: a check failed; the later ones are not run.
    """
    file = job.checked(part, progress)
    return replace(part, checks=demand(run_checks(file), job.options, job.precision, job.mapped, file.remedy))


def without_functions(job: Job[Any], parts: Sequence[Part], progress: Progress) -> list[Part]:
    """Remove the functions of attention nodes from checked files where a plugin is to compute these nodes."""
    if job.options.function_body:
        return list(parts)
    progress("Removing the function definition")
    bare = {"name": "onnx checker, no functions", "detail": "checked above with the functions"}
    found = []
    for part in parts:
        drop_attention_functions(part.lowered.model)
        shared = part.data if len(parts) > 1 else None
        saved = _saved(job, part, part.staged, shared)
        found.append(replace(saved, checks=[*part.checks, check_model(part.staged).model_copy(update=bare)]))
    return found


def publish(job: Job[R], parts: Sequence[Part], folder: Path, progress: Progress) -> R:
    """Move checked files with their sidecars to their places, all at once, and report."""
    progress("Writing")
    described = [(part, job.sidecar(part)) for part in parts]
    data = sorted({part.data for part in parts if part.data is not None})
    written = [(part.staged, sidecar, part.path) for part, sidecar in described if sidecar is not None]
    if written:
        publish_models(written[::-1], data)
    else:
        output = parts[0].path
        publish_together({folder / name: output.with_name(name) for name in data} | {parts[0].staged: output}, folder)
    job.published(folder)
    return job.report(described)
