"""Define `--plugin`, `--plugin-library` and `--backend`: what computes the attention node, and for which library."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..paths import INPUT


class PluginUse(str, Enum):
    """How an existing file is run."""

    auto = "auto"
    none = "none"

    @staticmethod
    def instead(text: str) -> str:
        """Return a hint for another value: the path of a library has an option of its own."""
        return f"A library is named with --plugin-library {text}" if Path(text).suffix or "/" in text else ""


class Backend(str, Enum):
    """An inference library that engines or libraries of kernels are made for."""

    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt-rtx"
    onnxruntime = "onnxruntime"


class Fp32Products(str, Enum):
    """How kernels for GPUs multiply fp32."""

    ieee = "ieee"
    tf32x3 = "tf32x3"
    tf32 = "tf32"


PluginOption = Annotated[
    PluginUse,
    typer.Option(
        "--plugin",
        help="What computes the attention node: auto: compiled kernels where there are any; none: standard operators.",
    ),
]
PluginLibraryOption = Annotated[
    Path | None,
    typer.Option("--plugin-library", help="Compute it with this library of compiled kernels, if you trust it."),
    INPUT,
]


def plugin_asked(use: PluginUse, library: Path | None) -> str:
    """Combine the two options into `plugin` of `localattn.load`: "auto", "none", or a path.

    Raises:
        UsageError: a library is named although none shall be used.
    """
    if library is None:
        return use.value
    if use is PluginUse.none:
        from ....core.errors import UsageError

        raise UsageError("--plugin none takes no --plugin-library.", fix="Leave one of them out.")
    named = str(library)
    return f"./{named}" if named in {other.value for other in PluginUse} else named
