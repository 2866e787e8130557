"""TensorRT-RTX, which runs the engines that it built."""

from __future__ import annotations

from ....core.errors import MissingDependency
from ....core.tensorrt_versions import TENSORRT_RTX
from ..backend import DoctorLine
from ..tensorrt.backend import EngineBackend


class TensorRtRtx(EngineBackend):
    """TensorRT-RTX."""

    name, title = TENSORRT_RTX, "TensorRT-RTX"

    def prepare_plugins(self) -> None:
        """Load the library under the name that plugin nodes look for."""
        from .preload import preload

        try:
            preload()
        except MissingDependency:
            return  # not installed: loading the plugin reports it

    def _library_line(self) -> DoctorLine:
        serves, distribution = "engines for RTX cards", "tensorrt-rtx-cu13"
        return DoctorLine("tensorrt_rtx", self.title, serves, ("package", "tensorrt_rtx", "builder"), distribution)


BACKEND = TensorRtRtx()
