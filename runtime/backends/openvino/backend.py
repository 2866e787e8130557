"""OpenVINO, which runs ONNX files where it is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..backend import Backend, Place
from .package import PACKAGE

if TYPE_CHECKING:
    from ....core.documents.sidecar import Sidecar
    from ....onnx_graph.onnx_file import OnnxFile
    from ..session import Session
    from ..step_file import Prefill
    from ..step_session import StepSession


class OpenVino(Backend):
    """OpenVINO and its devices; it computes in fp32 unless its name says otherwise."""

    name, title = "openvino", "OpenVINO"
    package = PACKAGE
    precisions = ("fp32", "fp16", "bf16")

    def providers(self) -> tuple[str, ...]:
        """List its devices; a neural processor is used only if it is named."""
        return ("cpu", "gpu", "npu")

    def _open(self, file: Path | OnnxFile, place: Place) -> Session:
        from .session import open_file

        return open_file(file, place.provider, place.threads, place.plugin, place.precision or self.precisions[0])

    def _open_step(self, file: Path | OnnxFile, sidecar: Sidecar, prefill: Prefill | None, place: Place) -> StepSession:
        from .step_session import OpenVinoStep

        precision = place.precision or self.precisions[0]
        return OpenVinoStep(file, sidecar, prefill, place.provider, place.threads, place.plugin, precision)


BACKEND = OpenVino()
