"""Define `--plugin`, `--plugin-library` and `--backend`: what computes the attention node, and for which library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from ....core.errors import UsageError
from ..paths import INPUT
from ..terminal.help import Hint

# Values of --plugin for running an existing file.
PluginUse = Literal["auto", "none"]

# Inference libraries that engines are built for; libraries of kernels are made for onnxruntime too.
EngineBackend = Literal["tensorrt", "tensorrt-rtx"]
Backend = Literal[EngineBackend, "onnxruntime"]

# How kernels for GPUs multiply fp32.
Fp32Products = Literal["ieee", "tf32x3", "tf32"]


def library_hint(text: str) -> str:
    """Return a hint where a library is given as `--plugin`: its path has an option of its own."""
    return f"Name a library with --plugin-library {text}" if Path(text).suffix or "/" in text else ""


PluginOption = Annotated[
    PluginUse,
    typer.Option(
        "--plugin",
        help="What computes the attention node: auto: compiled kernels where available; none: standard operators.",
    ),
    Hint(library_hint),
]
PluginLibraryOption = Annotated[
    Path | None,
    typer.Option(
        "--plugin-library", help="Compute the attention node with this library of compiled kernels, if you trust it."
    ),
    INPUT,
]


def plugin_asked(use: PluginUse, library: Path | None) -> str:
    """Combine the two options into `plugin` of `localattn.load`: "auto", "none", or a path.

    Raises:
        UsageError: a library is named although none shall be used.
    """
    if library is None:
        return use
    if use == "none":
        raise UsageError("--plugin none and --plugin-library exclude each other.", fix="Leave one of them out.")
    named = str(library)
    return f"./{named}" if named in get_args(PluginUse) else named
