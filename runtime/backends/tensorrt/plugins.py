"""Find and check plugin libraries, and register them with TensorRT.

Polygraphy's `LoadPlugins` only opens a library, which registers nothing. The plugins of this package are registered by
TensorRT itself, through the function `getCreators` that the library exports.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ....core.documents.engine_sidecar import PluginRecord
from ....core.error_texts import argument
from ....core.errors import CheckFailed, MissingDependency, UsageError
from ....core.nodes.attention import PLUGIN_NAMESPACE, PLUGIN_VERSION
from ....core.nodes.gpu import SERVED_OP_TYPES
from ....core.storage.library_store import AUTO, NONE, TENSORRT_PLUGIN, Library, find, read_named
from .library import TensorRTLibrary

_log = logging.getLogger(__name__)

# The library whose plugins are registered. A process can hold only one, because plugins are found by name alone.
_registered: list[str] = []

# Open handles of every library that was loaded. Networks and engines may live longer than the registration, for example
# in an error's traceback, and their destructors call into the library, so it must stay loaded.
_mapped: dict[str, ctypes.CDLL] = {}


@contextmanager
def loaded_plugin(opened: TensorRTLibrary, library: Library | None) -> Iterator[None]:
    """Register the library's plugins while the context lasts; None registers nothing.

    Raises:
        MissingDependency: TensorRT cannot load it.
    """
    if library is None:
        yield
        return
    handle = load_plugin(opened, library)
    try:
        yield
    finally:
        if handle is not None:
            opened.trt.get_plugin_registry().deregister_library(handle)
            _registered.clear()


def load_plugin(opened: TensorRTLibrary, library: Library) -> object | None:
    """Register the library's plugins for the rest of the process, as engines that use them need.

    Returns:
        The registry's handle of the library; None if its plugins are registered already.

    Raises:
        UsageError: this process has registered plugins of another library.
        MissingDependency: TensorRT cannot load it.
    """
    if registered_op_types(opened):
        if _registered != [library.sha256]:
            raise UsageError(
                f"{library.path} cannot be loaded.",
                why="This process has already registered plugins of another library, under the same names.",
                fix="Use one plugin library a process.",
            )
        return None
    opened.messages.clear()
    handle = opened.trt.get_plugin_registry().load_library(library.image)
    if handle is None or not registered_op_types(opened):
        raise MissingDependency(
            f"{opened.library.name} {opened.version} cannot load {library.path}.",
            why=library.in_words(opened.messages.reason()),
            fix="Build it for this machine: localattn plugin build; `localattn plugin check` shows what is in it.",
        )
    _mapped.setdefault(library.sha256, ctypes.CDLL(library.image))
    _registered[:] = [library.sha256]
    return handle  # type: ignore[no-any-return]


def mapped_library(record: PluginRecord | None) -> ctypes.CDLL | None:
    """Return the plugin library of an engine, as this process has it loaded; None if it needs none."""
    return None if record is None else _mapped.get(record.sha256)


def registered_op_types(opened: TensorRTLibrary) -> list[str]:
    """Return the op types of the attention node for which a plugin is registered."""
    registry = opened.trt.get_plugin_registry()
    return [
        op_type
        for op_type in SERVED_OP_TYPES
        if registry.get_creator(op_type, PLUGIN_VERSION, PLUGIN_NAMESPACE) is not None
    ]


def find_library(record: PluginRecord | None, engine: Path, plugin: str = AUTO) -> Library | None:
    """Find the plugin library that an engine needs; None if it needs none.

    The path in an engine's sidecar is never used: the library is looked for in the user's cache, or given by its path.

    Args:
        record: of the engine's plugins.
        engine: its path, for errors.
        plugin: "auto" for the library with the stated SHA-256 in the user's own cache, "none", or a library's path.

    Raises:
        UsageError: a path was given and the engine needs no library, or it leads to none.
        MissingDependency: no path was given, and the cache has no such library.
        CheckFailed: the library is not the one that the engine was built with.
    """
    if record is None or record.kind != "library":
        if plugin not in (AUTO, NONE):
            raise UsageError(
                f"{engine} takes no plugin library.",
                why="No library was used to build it: its attention is in the engine.",
                fix="Leave the plugin out.",
            )
        return None
    if plugin in (AUTO, NONE):
        try:
            found = find(TENSORRT_PLUGIN, sha256=record.sha256, this_release=False) if plugin == AUTO else None
        except CheckFailed as error:
            raise _needs(record, engine, f" {error.what} {error.why}") from error
        if found is None:
            raise _needs(record, engine)
        return found
    library = read_named(TENSORRT_PLUGIN, Path(plugin))
    if library.sha256 != record.sha256:
        raise CheckFailed(
            f"{plugin} is not the plugin library that {engine.name} was built with.",
            why=f"Its SHA-256 is {library.sha256}; the engine was built with {record.sha256}.",
            fix="Name the library it was built with, or build the engine again.",
        )
    return library


def _needs(record: PluginRecord, engine: Path, more: str = "") -> MissingDependency:
    name = Path(record.path).name or TENSORRT_PLUGIN.file_name
    return MissingDependency(
        f"{engine} needs the plugin library {name}, which is not loaded by itself.",
        why=f"Its SHA-256 is {record.sha256}; your cache of libraries has none with it.{more}",
        fix=f"If you trust the library, name it: {argument('plugin', 'PATH')}.",
    )
