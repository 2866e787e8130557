"""Engines of special kinds: for other releases or GPUs, without weights, to be refitted, with the plugin inside.

What the builder is told, what is refused before, and what can be seen of it in the finished engine without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .....core.documents.sidecar import CheckRecord
from .....core.error_texts import argument
from .....core.errors import MissingDependency, UsageError
from ...engines import BuildRequest
from ..device import Device
from ..library import TensorRTLibrary

# Values of `hardware_compatible` → names of TensorRT's HardwareCompatibilityLevel.
LEVELS = {"ampere-plus": "AMPERE_PLUS", "same-capability": "SAME_COMPUTE_CAPABILITY"}


def check_kind(opened: TensorRTLibrary, request: BuildRequest, device: Device | None) -> None:
    """Refuse a kind of engine that this library does not make, or not on this machine.

    Args:
        opened: the library.
        request: what to build.
        device: the GPU here; None without one.

    Raises:
        UsageError: the library, or its release, has no such engines; or no plugin library is used to be put in.
        MissingDependency: engines without weights, or whose weights can be replaced, are asked for without a GPU.
    """
    for name in ("strip_weights", "refit"):
        if getattr(request, name) and device is None:
            raise MissingDependency(
                f"{argument(name)} needs a GPU, and there is none here.",
                why=f"{opened.library.name} builds such engines on a GPU only: it fails without one.",
                fix=f"Build on a machine with a GPU, or leave {argument(name)} out.",
            )
    asked = {"version_compatible": request.version_compatible, "hardware_compatible": request.hardware_compatible}
    for name, value in asked.items():
        if value and not opened.library.portable:
            raise UsageError(
                f"{opened.library.name} takes no {argument(name)}.",
                why="Its engines are compiled for the GPU when they are opened, by the release that built them.",
                fix="Leave it out; name the GPUs as targets.",
            )
    level = request.hardware_compatible
    if level and not hasattr(opened.trt.HardwareCompatibilityLevel, LEVELS[level]):
        raise UsageError(f"{opened.library.name} {opened.version} has no level {level!r}.", fix="Take another level.")
    if request.embed_plugin and request.plugin.library is None:
        raise UsageError(
            "There is no plugin library to put into the engine.",
            why="Attention is built from its standard operators, or by kernels that are in the engine anyway.",
            fix=f"Leave out {argument('embed_plugin')}.",
        )


def options(opened: TensorRTLibrary, request: BuildRequest) -> dict[str, Any]:
    """Return the options of Polygraphy's configuration for the kind of engine."""
    switches = {
        "version_compatible": request.version_compatible,
        "refittable": request.refit,
        "strip_plan": request.strip_weights,
    }
    settings: dict[str, Any] = {name: True for name, asked in switches.items() if asked}
    if request.hardware_compatible is not None:
        level = LEVELS[request.hardware_compatible]
        settings["hardware_compatibility_level"] = getattr(opened.trt.HardwareCompatibilityLevel, level)
    return settings


def check_kept(engine: Path, request: BuildRequest) -> list[CheckRecord]:
    """Look into the finished engine: is the plugin library in it? What only a GPU shows is recorded as not proven."""
    records = []
    if request.embed_plugin and request.plugin.library is not None:
        library = Path(request.plugin.library.image).read_bytes()
        inside = library in engine.read_bytes()
        records.append(
            CheckRecord(
                name="plugin inside engine",
                status="passed" if inside else "failed",
                detail=f"all {len(library)} bytes of the library" if inside else "the library's bytes are not in it",
            )
        )
    asked = {
        "for later releases": request.version_compatible,
        f"for other GPUs ({request.hardware_compatible})": request.hardware_compatible is not None,
        "weights to be replaced": request.refit,
        "without weights": request.strip_weights,
    }
    kinds = ", ".join(name for name, value in asked.items() if value)
    if kinds:
        detail = f"{kinds}: the builder was told, and no such engine was seen on a GPU"
        records.append(CheckRecord(name="kind of engine", status="not proven", detail=detail))
    return records
