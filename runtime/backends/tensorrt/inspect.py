"""Inspect an engine: the sidecar beside it on any machine, and its layers if there is a GPU to open it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ....core.documents.engine_sidecar import EngineSidecar, read_engine_sidecar
from ....core.errors import CheckFailed, LocalAttnError
from ....core.storage.library_store import AUTO
from ....core.storage.publishing import check_unchanged
from .device import primary_context
from .kernels import load_kernels
from .layers import EngineLayer, read_layers
from .open import open_engine
from .plugins import find_library, mapped_library


@dataclass(frozen=True)
class EngineReport:
    """An engine file as it was found.

    Args:
        path: the file.
        sidecar: its sidecar.
        unchanged: whether it is the file that the sidecar describes.
        plugin_problem: why its plugin library would not load; "" if it would, or if it needs none.
        layers: its layers; None where it cannot be opened.
        why_closed: why it cannot be opened here; "" if it can.
        kernels: which machine code or PTX of its plugin library this GPU takes, a line a kernel; empty where it cannot
            be opened, or the kernels are not stated.
    """

    path: str
    sidecar: EngineSidecar
    unchanged: bool
    plugin_problem: str
    layers: list[EngineLayer] | None
    why_closed: str
    kernels: tuple[str, ...] = ()

    def layer_kinds(self) -> dict[str, int]:
        """Count the layers of each kind, most first."""
        return dict(Counter(layer.kind for layer in self.layers or []).most_common())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {
            "path": self.path,
            "unchanged": self.unchanged,
            "plugin_problem": self.plugin_problem,
            "why_closed": self.why_closed,
            "kernels": list(self.kernels),
            "layers": None if self.layers is None else [asdict(layer) for layer in self.layers],
            **self.sidecar.model_dump(mode="json", by_alias=True),
        }


def inspect_engine(path: Path, plugin: str = AUTO) -> EngineReport:
    """Inspect an engine: its sidecar, its plugin library and its layers.

    Args:
        path: the engine.
        plugin: its plugin library, as `runtime.session.load` takes it.

    Raises:
        UsageError: no such file, or no sidecar beside it.
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
