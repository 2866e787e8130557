"""What every runtime answers: which files are its, what it needs, how a file is opened, and its line of the doctor.

A runtime is a folder here with the same few files, and a row in `registry.py`:

    package.py        the Python package it needs, imported inside functions
    backend.py        its `Backend`, named BACKEND
    session.py        a file that is open: a subclass of `Session`
    step_session.py   a step file that is open: a subclass of `FileStep`

Importing `backend.py` of a runtime imports neither the runtime nor numpy: the other files are imported where they are
used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ...core.error_texts import HOW_TO_EXPORT_STEPS, argument
from ...core.errors import UsageError
from .package import Package

if TYPE_CHECKING:
    from ...core.documents.engine_sidecar import EngineSidecar
    from ...core.documents.sidecar import Sidecar
    from ...onnx_graph.onnx_file import OnnxFile
    from .session import Session
    from .step_file import Prefill
    from .step_session import StepSession

AUTO = "auto"
ONNX_SUFFIX = ".onnx"


@dataclass(frozen=True)
class Place:
    """Where a file runs, and with which kernels; as `runtime.session.load` takes them.

    Args:
        provider: a name that the backend knows, or "auto".
        threads: CPU threads for one operator; None leaves it to the runtime.
        plugin: library of compiled kernels: "auto", "none" or a path.
        precision: what it computes in, "bf16"; "" leaves it to the backend.
    """

    provider: str = AUTO
    threads: int | None = None
    plugin: str = AUTO
    precision: str = ""


@dataclass(frozen=True)
class DoctorLine:
    """What `localattn doctor` looks for, in a process of its own.

    Args:
        name: how commands refer to it.
        title: its name in reports.
        serves: its purpose.
        ask: arguments of `doctor/probe_process.py`: ("package", "openvino").
        distribution: the distribution that brings it; "" for none.
        add: a way to add it other than to install the distribution: a key of `_HOW_TO_ADD` in `doctor/probes.py`.
    """

    name: str
    title: str
    serves: str
    ask: tuple[str, ...]
    distribution: str = ""
    add: str = ""


class Backend(ABC):
    """A runtime. What is not overridden is that of a runtime for ONNX files.

    Attributes:
        name: in options and reports.
        title: in sentences.
        package: the Python package that it needs.
        suffix: of its files, in lower case.
        built: its files are built from ONNX files, for one kind of machine, and run in nothing else.
        precisions: what it can compute in, whatever the file's element type; its name then takes one: "openvino:bf16".
        tuned: `open_tuned` can profile a file.
        cpu_kernels: this package's compiled kernels for the CPU can compute attention nodes.
        triton_backend: the backend of Triton Inference Server that runs its files; "" if none does.
        how_to_make_steps: the commands that make a step file for it.
        steps_without_sidecar: why a step file needs its sidecar, whose name is `{}`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    package: ClassVar[Package]
    suffix: ClassVar[str] = ONNX_SUFFIX
    built: ClassVar[bool] = False
    precisions: ClassVar[tuple[str, ...]] = ()
    tuned: ClassVar[bool] = False
    cpu_kernels: ClassVar[bool] = False
    triton_backend: ClassVar[str] = ""
    how_to_make_steps: ClassVar[str] = HOW_TO_EXPORT_STEPS
    steps_without_sidecar: ClassVar[str] = (
        "Its sidecar {}, which describes its caches, is missing in its folder: copy it too."
    )

    def require(self) -> None:
        """Import what it needs to run a file.

        Raises:
            MissingDependency: why it cannot run here.
        """
        self.package.require()

    @abstractmethod
    def providers(self) -> tuple[str, ...]:
        """List the names of the places where it runs files, without "auto"."""

    def doctor_lines(self) -> tuple[DoctorLine, ...]:
        """List what `localattn doctor` looks for; the first is the runtime itself."""
        package = self.package.name
        serves = f"ONNX files in {self.title}"
        return (DoctorLine(self.name, self.title, serves, ("package", package), package),)

    def claims(self, path: Path) -> bool:
        """Return whether a file is one of its kind, by its name; of a built file, by its sidecar too."""
        return path.suffix.lower() == self.suffix

    def read(self, path: Path) -> Path | OnnxFile:
        """Return what `open` takes of a file that is there: an ONNX file is read, once.

        Raises:
            UsageError: the file cannot be read.
        """
        from ...onnx_graph.onnx_file import OnnxFile

        return OnnxFile.read(path)

    def sidecar(self, path: Path) -> Sidecar | EngineSidecar | None:
        """Read the sidecar next to a file; None without any.

        Raises:
            UsageError: they are broken, or missing where the file cannot do without.
        """
        from ...core.documents.sidecar import read_sidecar

        return read_sidecar(path)

    def open(self, file: Path | OnnxFile, place: Place) -> Session:
        """Open a file; raises what `runtime.session.load` raises."""
        self.admit(file, place)
        return self._open(file, place)

    def open_step(self, file: Path | OnnxFile, sidecar: Sidecar, prefill: Prefill | None, place: Place) -> StepSession:
        """Open a step file, and its prefill file where there is one; raises what `runtime.open_step` raises."""
        self.admit(file, place)
        return self._open_step(file, sidecar, prefill, place)

    def open_tuned(self, path: Path, place: Place, *, cuda_graph: bool, profile: str | None) -> Session:
        """Open a file to replay its runs as a CUDA graph, or to profile it into a folder; most runtimes cannot.

        Raises:
            UsageError: it cannot do so with this file, or what `open` raises.
        """
        what = argument("profile" if profile is not None else "cuda_graph")
        raise UsageError(
            f"{what} does not apply to {path}.",
            why="Only onnxruntime supports it.",
            fix=f"Leave {what} out, or measure the .onnx file.",
        )

    def rebuild(self, built: Path, changed: Path, plugin: str) -> Path:
        """Build a changed copy of the ONNX file that a file was built from, as that was built; return the new file.

        Raises:
            UsageError: this runtime builds nothing, or it cannot build this again.
        """
        raise UsageError(f"{self.title} builds no files.")

    def open_rounding(self, file: Path | OnnxFile, session: Session | StepSession, plugin: str) -> Session | None:
        """Open an fp16 file so that it rounds as a GPU does; None where the open session rounds that way already."""
        return None

    def admit(self, file: Path | OnnxFile, place: Place) -> None:
        """Check all that must hold before a file is opened: the runtime is here, and it has such a place.

        Raises:
            MissingDependency: why it cannot run here.
            UsageError: it has no such provider or precision.
        """
        self.require()
        self.check_place(file, place)

    def check_place(self, file: Path | OnnxFile, place: Place) -> None:
        """Refuse a provider or a precision that it does not have.

        Raises:
            UsageError: it names those that it has.
        """
        if place.provider not in (AUTO, *self.providers()):
            raise UsageError(
                f"There is no provider {place.provider!r} for {self.title}.",
                fix=f"Known: {AUTO}, {', '.join(self.providers())}.",
            )
        if place.precision and place.precision not in self.precisions:
            raise UsageError(
                f"{self.title} does not compute in {place.precision!r}.",
                fix=f"Known: {', '.join(f'{self.name}:{known}' for known in self.precisions)}.",
            )

    @abstractmethod
    def _open(self, file: Path | OnnxFile, place: Place) -> Session:
        """Open a file whose runtime is there, at a place that was checked."""

    def _open_step(self, file: Path | OnnxFile, sidecar: Sidecar, prefill: Prefill | None, place: Place) -> StepSession:
        """Open a step file likewise.

        Raises:
            UsageError: this runtime has no sessions of step files.
        """
        raise UsageError(
            f"{Path(file)} does not run in {self.title}.",
            why="It is a step file, and localattn holds no caches between calls of this runtime.",
            fix=f"Leave {argument('runtime')} out.",
        )
