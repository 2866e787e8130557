"""Load a plugin library into the plugin registry of TensorRT or TensorRT-RTX, and list what it adds."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.errors import BuildFailed, MissingDependency
from ...core.nodes.attention import PLUGIN_NAMESPACE
from ...core.storage.library_store import Library

Backend = Literal["tensorrt", "tensorrt-rtx"]
BACKENDS: tuple[Backend, ...] = ("tensorrt", "tensorrt-rtx")
_MODULES: dict[Backend, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_INSTALL: dict[Backend, str] = {
    "tensorrt": "pip install 'localattn[tensorrt]' (on a Jetson, TensorRT comes with JetPack)",
    "tensorrt-rtx": "pip install 'localattn[rtx]'",
}


@dataclass(frozen=True)
class AttributeSummary:
    """One attribute of a creator: its name, type as TensorRT calls it, and number of values."""

    name: str
    type: str
    length: int


@dataclass(frozen=True)
class CreatorSummary:
    """One op type, as the registry lists it."""

    name: str
    version: str
    namespace: str
    attributes: tuple[AttributeSummary, ...]


@dataclass(frozen=True)
class RegistrySummary:
    """What a library added to a registry.

    Args:
        backend: whose registry: "tensorrt" or "tensorrt-rtx".
        version: its release.
        creators: those in the namespace of this package, by name.
    """

    backend: Backend
    version: str
    creators: tuple[CreatorSummary, ...]


def available_backends() -> list[Backend]:
    """List which of TensorRT and TensorRT-RTX can be imported on this machine."""
    return [backend for backend in _MODULES if not why_not(backend)]


def why_not(backend: Backend) -> str:
    """Return why a backend cannot be used here; empty if it can."""
    try:
        _import(backend)
    except MissingDependency as error:
        return error.why
    return ""


def load_into_registry(library: Library, backends: Sequence[Backend] = BACKENDS) -> RegistrySummary:
    """Load a library into a plugin registry, list what it adds, and unload it.

    The registry is that of the first of these backends that can be imported.

    Raises:
        MissingDependency: none of the backends can be imported.
        BuildFailed: TensorRT does not take the library.
    """
    missing = []
    for backend in backends:
        try:
            trt = _import(backend)
        except MissingDependency as error:
            missing.append(error)
            continue
        return _look(trt, backend, library)
    raise MissingDependency(
        "The plugin library cannot be loaded.",
        why=" ".join(error.why for error in missing),
        fix=f"Install one: {'; or '.join(_INSTALL[backend] for backend in backends)}.",
    )


def _import(backend: Backend) -> Any:
    """Import the backend's Python module.

    Raises:
        MissingDependency: it is not installed, or does not import.
    """
    name = _MODULES[backend]
    try:
        module = importlib.import_module(name)
        module.get_plugin_registry  # noqa: B018 - an empty package of that name has none
    except Exception as error:  # the package on PyPI may fail in many ways without NVIDIA's libraries
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        raise MissingDependency(
            f"{name} cannot be imported.", why=f"{name} {reason}.", fix=f"Install it: {_INSTALL[backend]}."
        ) from error
    return module


def _look(trt: Any, backend: Backend, library: Library) -> RegistrySummary:
    """Load the library into the registry of the module `trt`, list what it adds, and unload it."""
    logger = trt.Logger(trt.Logger.WARNING)
    trt.Builder(logger)  # sets this logger for the process, and so for the library
    registry = trt.get_plugin_registry()
    handle = registry.load_library(library.image)
    if handle is None:
        raise BuildFailed(
            f"{backend} {trt.__version__} does not load {library.path}.",
            why="The messages above give the reason.",
            fix="Build the library again: localattn plugin build --force",
        )
    try:
        creators = tuple(
            CreatorSummary(
                name=creator.name,
                version=creator.plugin_version,
                namespace=creator.plugin_namespace,
                attributes=tuple(
                    AttributeSummary(field.name, str(field.type).rpartition(".")[2], field.size)
                    for field in creator.field_names
                ),
            )
            for creator in registry.all_creators
            if creator.plugin_namespace == PLUGIN_NAMESPACE
        )
    finally:
        registry.deregister_library(handle)
    return RegistrySummary(backend, trt.__version__, tuple(sorted(creators, key=lambda creator: creator.name)))
