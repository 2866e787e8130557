"""Build an engine again from a changed copy of its ONNX file: with the same library, GPUs and plugin."""

from __future__ import annotations

from pathlib import Path

from .....core.documents.engine_sidecar import read_engine_sidecar
from .....core.error_texts import argument
from .....core.errors import UsageError
from ...engines import BuildRequest, PluginChoice
from ..plugins import find_library
from .build import build_engine


def rebuild(engine: Path, changed: Path, plugin: str) -> Path:
    """Build the changed ONNX file as the engine was built; return the new engine, next to that file.

    Args:
        engine: the engine, with its sidecar next to it.
        changed: the changed copy of the ONNX file that it was built from.
        plugin: the engine's plugin library, as `runtime.session.load` takes it.

    Raises:
        UsageError: the engine has plugins that cannot be put into another one here, or an input that cannot be read.
        MissingDependency: the library, a GPU or the plugin library is missing.
        BuildFailed: the build failed.
    """
    sidecar = read_engine_sidecar(engine)
    choice = PluginChoice()
    if sidecar.plugin is not None:
        if sidecar.plugin.kind != "library":
            raise UsageError(
                "Bisecting rebuilds the engine, which is not possible with ahead-of-time plugins.",
                fix=f"Bisect the ONNX file, or an engine built with {argument('plugin', 'library')}.",
            )
        choice = PluginChoice("library", find_library(sidecar.plugin, engine, plugin), asked="library")
    output = changed.with_suffix(engine.suffix)
    build_engine(BuildRequest(changed, output, sidecar.backend, sidecar.targets, choice))
    return output
