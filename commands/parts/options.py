"""Declare the options that several commands share."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import typer

from ...core.limits import LARGEST_SEED, LARGEST_SIZE
from ...exporter.options import CheckOptions, CheckpointOptions, Checks, options_of

# How a result is printed.
Format = Literal["console", "json"]

_OF_CHECKPOINTS = options_of(CheckpointOptions)

FormatOption = Annotated[Format, typer.Option("--format", help="console, or json to print JSON only.")]
RuntimeOption = Annotated[
    str,
    typer.Option(
        help="Runtime for ONNX files: auto (onnxruntime), or openvino, which computes in fp32; openvino:bf16 is faster."
    ),
]
EntryOption = Annotated[
    str | None,
    typer.Option(
        metavar=_OF_CHECKPOINTS["entry"].metavar,
        help=_OF_CHECKPOINTS["entry"].help,
    ),
]
FactoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="FUNCTION",
        help="A function that returns your own module: package.module:function or file.py:function; --against has its "
        "weights. (Default: the one it was exported with, on the machine of the export.)",
    ),
]
FactoryArgsOption = Annotated[
    str | None, typer.Option(metavar="JSON", help="Its keyword arguments. (Default: those of the export.)")
]
ProviderOption = Annotated[
    str,
    typer.Option(
        help="Where to run: auto (the best that starts), cpu, cuda or tensorrt; cuda:1 for an engine on GPU 1."
    ),
]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads for one operator.")]

ChecksOption = Annotated[Checks, typer.Option(help=options_of(CheckOptions)["checks"].help)]


def finite(value: float | None) -> float | None:
    """Refuse NaN and infinity as the value of an option that is a number: ranges let them pass."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def number_option(help_text: str) -> Any:
    """Declare an option that is a finite number of 0 or more."""
    return typer.Option(min=0, callback=finite, help=help_text)


def size_option(help_text: str, least: int | None = None) -> Any:
    """Declare an option that is a size or a count; without `least`, the code that uses it checks the value."""
    return typer.Option(min=least, max=LARGEST_SIZE, help=help_text)


def seed_option(help_text: str) -> Any:
    """Declare an option that is a seed of random numbers."""
    return typer.Option(min=0, max=LARGEST_SEED, help=help_text)
