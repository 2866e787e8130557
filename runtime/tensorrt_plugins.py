"""Plugin libraries: found, checked, and put into TensorRT's registry.

Polygraphy's `LoadPlugins` only opens a library, which registers nothing: those of this package are registered by
TensorRT itself, through the function `getCreators` that they export.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.engine_facts import PluginFacts
from ..core.errors import CheckFailed, MissingDependency, UsageError
from ..core.files import is_file, sha256
from ..core.node import PLUGIN_NAMESPACE, PLUGIN_VERSION, VARIANTS
from .tensorrt_library import Opened

# The library whose plugins are registered: a process can hold one, because plugins are found by their names alone.
_registered: list[str] = []

# Handles of ours on every library that was loaded. Networks and engines may live longer than the registration, in the
# traceback of an error for one, and their destructors call into the library: it must not be unmapped.
_mapped: dict[str, ctypes.CDLL] = {}


@contextmanager
def loaded_plugin(opened: Opened, library: Path | None) -> Iterator[None]:
    """The library's plugins are registered while the context lasts; None registers nothing.

    Raises:
        MissingDependency: the library is not there, or TensorRT cannot load it.
    """
    if library is None:
        yield
        return
    handle = _load(opened, library)
    try:
        yield
    finally:
        if handle is not None:
            opened.trt.get_plugin_registry().deregister_library(handle)
            _registered.clear()


def load_plugin(opened: Opened, library: Path) -> None:
    """Register the library's plugins for the rest of the process, as engines that use them need.

    Raises:
        MissingDependency: the library is not there, or TensorRT cannot load it.
    """
    _load(opened, library)


def _load(opened: Opened, library: Path) -> object | None:
    """The registry's handle of a library; None if its plugins are registered already."""
    if not library.is_file():
        raise MissingDependency(f"The plugin library {library} is not there.", fix="Build it: localattn plugin build.")
    digest = sha256(library)
    if registered_op_types(opened):
        if _registered != [digest]:
            raise UsageError(
                f"{library} cannot be loaded.",
                why="This process has already registered plugins of another library, under the same names.",
                fix="Use one plugin library a process.",
            )
        return None
    opened.messages.clear()
    handle = opened.trt.get_plugin_registry().load_library(str(library.resolve()))
    if handle is None or not registered_op_types(opened):
        raise MissingDependency(
            f"{opened.library.name} {opened.version} cannot load {library}.",
            why=opened.messages.reason(),
            fix="Build it for this machine: localattn plugin build; `localattn plugin check` shows what is in it.",
        )
    _mapped.setdefault(digest, ctypes.CDLL(str(library.resolve())))
    _registered[:] = [digest]
    return handle  # type: ignore[no-any-return]


def registered_op_types(opened: Opened) -> list[str]:
    """The op types of the attention node for which a plugin is registered."""
    registry = opened.trt.get_plugin_registry()
    return [
        variant.op_type
        for variant in VARIANTS
        if registry.get_creator(variant.op_type, PLUGIN_VERSION, PLUGIN_NAMESPACE) is not None
    ]


def find_library(facts: PluginFacts, engine: Path) -> Path:
    """The plugin library an engine needs: beside the engine, or where it lay when the engine was built.

    Raises:
        MissingDependency: it is in neither place.
        CheckFailed: what lies there is another library.
    """
    recorded = Path(facts.path)
    places = [engine.parent / recorded.name, recorded]
    found = next((place for place in places if is_file(place)), None)
    if found is None:
        raise MissingDependency(
            f"The plugin library of {engine} is missing.",
            why=f"Looked for {' and '.join(map(str, dict.fromkeys(places)))}.",
            fix=f"Copy {recorded.name} beside the engine.",
        )
    actual = sha256(found)
    if actual != facts.sha256:
        raise CheckFailed(
            f"{found} is not the plugin library that {engine.name} was built with.",
            why=f"Its SHA-256 is {actual}; the engine was built with {facts.sha256}.",
            fix="Copy the library it was built with beside the engine, or build the engine again.",
        )
    return found
