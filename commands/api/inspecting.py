"""Define `localattn.inspect`: what a checkpoint, an exported file, an engine or a module of your own is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.wrong_file import check_exists
from .factory_args import as_json
from .packages import packages_named
from .paths import as_path


def inspect(
    file: str | Path | None = None,
    *,
    config: str | Path | None = None,
    entry: str | None = None,
    factory: str | None = None,
    factory_args: str | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe a file, or a module of your own, in JSON types, as `localattn inspect --format json` prints it.

    Args:
        file: a checkpoint, an ONNX file or an engine; with a `factory` the checkpoint of its weights.
        config: the checkpoint's configuration; by default the one in its folder.
        entry: the set of weights to describe, where the checkpoint holds several.
        factory: a function that makes your own module.
        factory_args: its keyword arguments.

    Raises:
        UsageError: the file cannot be read, or the module cannot be made.
        MissingDependency: a package is not installed.

    Examples:
        >>> localattn.inspect("model.onnx")["inputs"][0]["name"]
        'tokens'
    """
    from ...runtime.backends import registry
    from ...runtime.backends.building import BuildingBackend

    if factory is not None:
        with packages_named():
            from ...exporter.user_module.describe import describe_module

        return describe_module(factory, as_json(factory_args), as_path(file), entry)
    if file is None:
        raise UsageError("There is nothing to inspect.", fix=f"Give a file, or {argument('factory')}.")
    path = Path(file)
    backend = registry.of_file(path)
    if backend is None:
        check_exists(path)
        with packages_named():
            from ...exporter.checkpoint.describe import describe_checkpoint

        return describe_checkpoint(path, as_path(config), entry)
    if isinstance(backend, BuildingBackend):
        from ...onnx_graph.windows import windows_of_sidecar

        report = backend.inspect(path, "auto")
        return {**report.to_dict(), "windows": [view.to_dict() for view in windows_of_sidecar(report.sidecar.model)]}
    from ...onnx_graph.summary import inspect_onnx
    from ...onnx_graph.windows import windows_of_file

    summary = inspect_onnx(path)
    return {**summary.to_dict(), "windows": [view.to_dict() for view in windows_of_file(summary)]}
