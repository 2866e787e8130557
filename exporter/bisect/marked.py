"""Open a copy of a file that also returns its intermediate values.

An ONNX file runs in onnxruntime. The intermediate values of an engine cannot be read, so the ONNX file it was built
from is built again with the same library, plugin and precision, and with these values as outputs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import onnx

from ...core.documents.engine_facts import ENGINE_SUFFIX, EngineFacts, read_engine_facts
from ...core.error_texts import argument
from ...core.errors import CheckFailed, UsageError
from ...core.storage.files import sha256
from ...onnx_graph.graph_values import external_files
from ...runtime.session import Session, load
from .request import BisectRequest


def onnx_file_of(model: Path) -> Path:
    """Return the ONNX file to look into: the model itself, or the file that an engine was built from.

    Raises:
        UsageError: the engine's ONNX file is not beside it.
        CheckFailed: that file is not the one the engine was built from.
    """
    if model.suffix.lower() != ENGINE_SUFFIX:
        return model
    facts = read_engine_facts(model)
    path = model.with_name(facts.onnx_name)
    if not path.is_file():
        raise UsageError(
            f"{path} is not there.",
            why=f"To look into {model.name}, the ONNX file it was built from is needed.",
            fix="Copy it beside the engine.",
        )
    if sha256(path) != facts.onnx_sha256:
        raise CheckFailed(f"{path} is not the file {model.name} was built from.", why="Its SHA-256 differs.")
    return path


def open_marked(document: onnx.ModelProto, values: Sequence[str], folder: Path, request: BisectRequest) -> Session:
    """Open the model with more outputs.

    Args:
        document: the model's ONNX file, read without external data; it is changed in place.
        values: names of values to return as well.
        folder: an empty folder for the copy.
        request: names the model, where to run an ONNX file, and the plugin library of an engine.

    Raises:
        UsageError: the copy cannot be loaded.
        MissingDependency: for an engine, no GPU or no library here.
        BuildFailed: the copy of an engine could not be built.
    """
    graph = document.graph
    known = {value.name: value for value in (*graph.value_info, *graph.output)}
    present = {value.name for value in graph.output}
    graph.output.extend(known[name] for name in dict.fromkeys(values) if name not in present)
    model = request.model
    source = onnx_file_of(model)
    for name in external_files(document):
        _link(source.with_name(name), folder / name)
    marked = folder / "marked.onnx"
    marked.write_bytes(document.SerializeToString())
    if model.suffix.lower() != ENGINE_SUFFIX:
        return load(marked, provider=request.provider, plugin="none")
    return load(_build(marked, read_engine_facts(model), request), plugin=request.plugin)


def _build(marked: Path, facts: EngineFacts, request: BisectRequest) -> Path:
    from ...runtime.engine.builder.build import build_engine
    from ...runtime.engine.builder.request import BuildRequest, PluginChoice
    from ...runtime.engine.plugins import find_library

    plugin = PluginChoice()
    if facts.plugin is not None:
        if facts.plugin.kind != "library":
            raise UsageError(
                "An engine with ahead-of-time plugins cannot be built again here.",
                fix=f"Bisect the ONNX file, or an engine built with {argument('plugin', 'library')}.",
            )
        plugin = PluginChoice("library", find_library(facts.plugin, request.model, request.plugin), asked="library")
    output = marked.with_suffix(ENGINE_SUFFIX)
    build_engine(BuildRequest(marked, output, facts.backend, facts.targets, plugin))
    return output


def _link(source: Path, target: Path) -> None:
    """Link a file to another path, or copy it where links are not possible."""
    if source.name != target.name or Path(source.name).is_absolute():
        raise UsageError(f"The external data of the model is not beside it: {source}.")
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
