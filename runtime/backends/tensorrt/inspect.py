"""Inspect an engine: the sidecar next to it on any machine, and its layers if there is a GPU to open it."""

from __future__ import annotations

from pathlib import Path

from ....core.documents.engine_sidecar import EngineSidecar, read_engine_sidecar
from ....core.errors import CheckFailed, LocalAttnError
from ....core.storage.library_store import AUTO
from ....core.storage.publishing import check_unchanged
from ..engines import EngineLayer, EngineReport
from .device import primary_context
from .kernels import load_kernels
from .layers import read_layers
from .open import open_engine
from .plugins import find_library, mapped_library


def inspect_engine(path: Path, plugin: str = AUTO) -> EngineReport:
    """Inspect an engine: its sidecar, its plugin library and its layers.

    Args:
        path: the engine.
        plugin: its plugin library, as `runtime.session.load` takes it.

    Raises:
        UsageError: no such file, or no sidecar next to it.
    """
    sidecar = read_engine_sidecar(path)
    changed = _change(path)
    layers, why, kernels = (None, changed, ()) if changed else _opened(path, plugin)
    return EngineReport(
        path=str(path),
        sidecar=sidecar,
        unchanged=not changed,
        plugin_problem=_plugin_problem(sidecar, path, plugin),
        layers=layers,
        why_closed=why,
        kernels=kernels,
    )


def _change(path: Path) -> str:
    """Return why the file is not the one that its sidecar describes; empty if it is."""
    if not path.is_file():
        return f"There is no file {path}."
    try:
        check_unchanged(path)
    except CheckFailed as error:
        return f"{error.what} {error.why}"
    return ""


def _plugin_problem(sidecar: EngineSidecar, path: Path, plugin: str) -> str:
    try:
        find_library(sidecar.plugin, path, plugin)
    except LocalAttnError as error:
        return f"{error.what} {error.why} {error.fix}"
    return ""


def _opened(path: Path, plugin: str) -> tuple[list[EngineLayer] | None, str, tuple[str, ...]]:
    try:
        opened = open_engine(path, plugin)
    except LocalAttnError as error:
        return None, f"{error.what} {error.why}".strip(), ()
    record = opened.sidecar.plugin
    library = mapped_library(record)
    kernels: tuple[str, ...] = ()
    if record is not None and library is not None:
        with primary_context():
            kernels = load_kernels(library, record.kernels)
    return read_layers(opened.opened, opened.engine), "", kernels
