"""onnxruntime, which runs ONNX files where no other runtime is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ....core.machine.execution_providers import CPU, CUDA, TENSORRT
from ..backend import Backend, DoctorLine, Place
from .package import PACKAGE

if TYPE_CHECKING:
    from ....core.documents.sidecar import Sidecar
    from ....onnx_graph.onnx_file import OnnxFile
    from ..session import Session
    from ..step_file import Prefill
    from ..step_session import StepSession


class OnnxRuntime(Backend):
    """onnxruntime and its execution providers."""

    name = title = "onnxruntime"
    package = PACKAGE
    tuned = cpu_kernels = True
    triton_backend = "onnxruntime"

    def providers(self) -> tuple[str, ...]:
        """List the rows of `PROVIDERS`."""
        from .providers import PROVIDERS

        return tuple(PROVIDERS)

    def doctor_lines(self) -> tuple[DoctorLine, ...]:
        """List the package, and the providers that must really start."""
        return (
            DoctorLine(
                "onnxruntime",
                "onnxruntime",
                "running ONNX files",
                ("package", "onnxruntime", "providers"),
                "onnxruntime",
            ),
            _provider("cpu", "the CPU", CPU, "running ONNX files", "onnxruntime"),
            _provider("cuda", "the GPU", CUDA, "files on the GPU", add="onnxruntime-gpu"),
            _provider("tensorrt-provider", "TensorRT", TENSORRT, "files through TensorRT", add="onnxruntime-gpu"),
        )

    def open_tuned(self, path: Path, place: Place, *, cuda_graph: bool, profile: str | None) -> Session:
        """Open a file with onnxruntime's profile, or its recording of a CUDA graph."""
        from .tuned import open_tuned

        self.admit(path, place)
        return open_tuned(
            path, place.provider, place.threads, cuda_graph=cuda_graph, profile=profile, plugin=place.plugin
        )

    def open_rounding(self, file: Path | OnnxFile, session: Session | StepSession, plugin: str) -> Session | None:
        """Open the file anew where it runs on the CPU, which does not round between its operators."""
        if session.provider != "cpu":
            return None
        from .session import open_file

        return open_file(file, "cpu", plugin=plugin, halves="rounded")

    def _open(self, file: Path | OnnxFile, place: Place) -> Session:
        from .session import open_file

        return open_file(file, place.provider, place.threads, place.plugin)

    def _open_step(self, file: Path | OnnxFile, sidecar: Sidecar, prefill: Prefill | None, place: Place) -> StepSession:
        from .step_session import OnnxRuntimeStep

        return OnnxRuntimeStep(file, sidecar, prefill, place.provider, place.threads, place.plugin)


def _provider(name: str, where: str, provider: str, serves: str, package: str = "", add: str = "") -> DoctorLine:
    return DoctorLine(name, f"onnxruntime on {where}", serves, ("provider", provider), package, add)


BACKEND = OnnxRuntime()
