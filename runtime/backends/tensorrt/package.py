"""TensorRT's and TensorRT-RTX's Python packages, and Polygraphy, through which engines of both run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ....core.tensorrt_versions import TENSORRT
from ..package import Package

# Both need it. Which of the two libraries an engine needs, its sidecar says: `library.py` opens that one.
POLYGRAPHY = Package(
    name="polygraphy",
    has="config",
    install="Install it: pip install 'localattn[tensorrt]', or for TensorRT-RTX pip install 'localattn[rtx]'.",
)


@dataclass(frozen=True)
class Library:
    """One of the two libraries. What is not overridden is TensorRT's.

    Args:
        name: its name in options and reports.
        module: import name.
        extra: the extra of this package that installs its Python package.
        install: advice where it is missing.

    Attributes:
        is_rtx: Polygraphy must be bound to TensorRT-RTX.
        portable: it has engines that run in later releases, and on other GPUs.
    """

    name: str
    module: str
    extra: str
    install: str
    is_rtx: ClassVar[bool] = False
    portable: ClassVar[bool] = True

    def prepare(self) -> None:
        """Do what must be done before its package is imported.

        Raises:
            MissingDependency: it is not installed, or does not run on this machine.
        """
        return

    def loaders(self) -> Sequence[str]:
        """List Polygraphy's modules of loaders for it, which import it."""
        return ("polygraphy.backend.trt",)

    def configuration(self, targets: Sequence[int], common: Mapping[str, Any]) -> Any:
        """Return Polygraphy's loader of a builder's configuration.

        Args:
            targets: compute capabilities to build for, 89 for 8.9.
            common: the arguments that both libraries take.
        """
        from polygraphy.backend.trt import CreateConfig

        return CreateConfig(**common)

    def adjust(self, trt: Any, config: Any) -> None:
        """Change what Polygraphy's loader cannot set in a builder's configuration."""
        return

    def lacks_products(self, targets: Sequence[int]) -> bool:
        """Return whether it has no fp32 matrix products for one of these compute capabilities."""
        return False


PACKAGE = Library(
    TENSORRT,
    "tensorrt",
    "tensorrt",
    "On Jetson it comes with JetPack (sudo apt install nvidia-jetpack; a virtual environment needs "
    "--system-site-packages). Elsewhere: pip install tensorrt, which fetches the libraries from NVIDIA's own "
    "package index.",
)
