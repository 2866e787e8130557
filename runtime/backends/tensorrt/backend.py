"""TensorRT, which runs the engines that it built; the backend of TensorRT-RTX's engines begins here too."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from ....core.error_texts import HOW_TO_EXPORT_STEPS
from ....core.errors import LocalAttnError
from ....core.tensorrt_versions import TENSORRT
from ..backend import DoctorLine, Place
from ..building import BuildingBackend
from .package import POLYGRAPHY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ....core.documents.engine_sidecar import EngineSidecar
    from ....core.documents.sidecar import Sidecar
    from ....onnx_graph.onnx_file import OnnxFile
    from ..engines import BuildReport, BuildRequest, Compare, EngineReport
    from ..session import Session
    from ..step_file import Prefill
    from ..step_session import StepSession

_POLYGRAPHY = DoctorLine(
    "polygraphy", "Polygraphy", "building and running engines", ("package", "polygraphy"), "polygraphy"
)


class EngineBackend(BuildingBackend):
    """A library that builds engines from ONNX files, and runs them on one kind of GPU."""

    package = POLYGRAPHY
    suffix = ".engine"
    how_to_make_steps = (
        f"{HOW_TO_EXPORT_STEPS}, and build both files it writes: localattn build model_step.onnx; "
        "localattn build model_step.prefill.onnx (with --backend tensorrt-rtx for RTX GPUs)"
    )
    steps_without_sidecar = "It was built from an ONNX file without the sidecar, which describes the caches."

    def providers(self) -> tuple[str, ...]:
        """List the names of the first GPU; "cuda:1" is the second."""
        return ("cuda", "tensorrt")

    def doctor_lines(self) -> tuple[DoctorLine, ...]:
        """List the library, and Polygraphy."""
        return (self._library_line(), _POLYGRAPHY)

    def claims(self, path: Path) -> bool:
        """Return whether a file is an engine of this library, as its sidecar says.

        An engine whose sidecar cannot be read counts as TensorRT's, which refuses to open it.
        """
        if not super().claims(path):
            return False
        try:
            library: str = self.sidecar(path).backend
        except (LocalAttnError, ValueError):  # the latter where no file can have the name
            library = TENSORRT
        return library == self.name

    def read(self, path: Path) -> Path:
        """Return the path: the library reads an engine when everything else is known to fit."""
        return path

    def sidecar(self, path: Path) -> EngineSidecar:
        """Read the sidecar next to an engine.

        Raises:
            UsageError: there are none, or they are broken.
        """
        from ....core.documents.engine_sidecar import read_engine_sidecar

        return read_engine_sidecar(path)

    def open_tuned(self, path: Path, place: Place, *, cuda_graph: bool, profile: str | None) -> Session:
        """Open an engine whose calls become CUDA graphs; it cannot be profiled."""
        if profile is not None:
            return super().open_tuned(path, place, cuda_graph=cuda_graph, profile=profile)
        session = self.open(path, place)
        session.use_cuda_graph()
        return session

    def targets(self, wanted: Sequence[str], device: int) -> list[int]:
        """Return the compute capabilities that the library would build for."""
        from .builder.build import plan_targets

        return plan_targets(self.name, wanted, device)

    def check_buildable(self, file: OnnxFile, targets: Sequence[int]) -> None:
        """Refuse numbers in fp8 for GPUs that cannot multiply them."""
        from .builder.source import check_fp8

        check_fp8(file, targets)

    def build(self, request: BuildRequest, progress: Callable[[str], None], compare: Compare | None) -> BuildReport:
        """Build with the library that the request names."""
        from .builder.build import build_engine

        return build_engine(request, progress, compare)

    def inspect(self, path: Path, plugin: str) -> EngineReport:
        """Inspect an engine, with its layers where there is a GPU to open it."""
        from .inspect import inspect_engine

        return inspect_engine(path, plugin)

    def rebuild(self, built: Path, changed: Path, plugin: str) -> Path:
        """Build with the same library, for the same GPUs, and with the same plugin."""
        from .builder.rebuild import rebuild

        return rebuild(built, changed, plugin)

    def check_place(self, file: Path | OnnxFile, place: Place) -> None:
        """Refuse anything but a GPU."""
        from .session import check_place

        check_place(Path(file), place.provider, place.threads)

    @abstractmethod
    def _library_line(self) -> DoctorLine:
        """Return the line of the library's Python package."""

    def _open(self, file: Path | OnnxFile, place: Place) -> Session:
        from .session import open_file

        return open_file(Path(file), place.provider, place.threads, place.plugin)

    def _open_step(self, file: Path | OnnxFile, sidecar: Sidecar, prefill: Prefill | None, place: Place) -> StepSession:
        from .step_session import EngineStep

        return EngineStep(Path(file), sidecar, prefill, place.provider, place.threads, place.plugin)


class TensorRt(EngineBackend):
    """TensorRT."""

    name, title = TENSORRT, "TensorRT"
    kernels_inside = True
    triton_backend = "tensorrt"

    def _library_line(self) -> DoctorLine:
        serves = "engines for GPUs and Jetson"
        return DoctorLine(
            "tensorrt", self.title, serves, ("package", "tensorrt", "builder"), "tensorrt", add="tensorrt"
        )


BACKEND = TensorRt()
