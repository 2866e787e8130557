"""Define what a runtime is asked that builds its files from ONNX files: to build one, and to inspect it."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from .backend import Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...onnx_graph.onnx_file import OnnxFile
    from .engines import BuildReport, BuildRequest, Compare, EngineReport


class BuildingBackend(Backend):
    """A runtime that builds engines from ONNX files, for one kind of GPU, and runs them.

    Attributes:
        kernels_inside: it can put kernels of its own into an engine, so that no plugin library is needed.
    """

    built = True
    kernels_inside: ClassVar[bool] = False

    @abstractmethod
    def targets(self, wanted: Sequence[str], device: int) -> list[int]:
        """Return the compute capabilities that an engine would be built for, 89 for 8.9.

        Args:
            wanted: the targets that the user named; none for the default.
            device: number of the GPU to build on.

        Raises:
            UsageError: it cannot build for one of them here.
            MissingDependency: the library, its driver or a GPU is missing.
        """

    @abstractmethod
    def check_buildable(self, file: OnnxFile, targets: Sequence[int]) -> None:
        """Refuse a file that these GPUs cannot compute, before anything is built.

        Raises:
            UsageError: why they cannot.
        """

    @abstractmethod
    def build(self, request: BuildRequest, progress: Callable[[str], None], compare: Compare | None) -> BuildReport:
        """Build an engine and its sidecar; either both appear, or nothing.

        Args:
            request: what to build.
            progress: called with each step as it begins.
            compare: compares the engine with the ONNX file, if the engine runs here.

        Raises:
            UsageError: an input that cannot be read, or an existing output.
            MissingDependency: the library, its driver, or the plugin library is missing.
            BuildFailed: the build fails, or a check of the result does.
        """

    @abstractmethod
    def inspect(self, path: Path, plugin: str) -> EngineReport:
        """Inspect an engine: its sidecar, its plugin library, and its layers where it can be opened.

        Raises:
            UsageError: no such file, or no sidecar.
        """

    def prepare_plugins(self) -> None:
        """Make the library ready for a plugin library to be loaded; nothing if it is not installed."""
