"""Open a copy of a file that also returns its intermediate values, at one size of each dynamic axis.

An ONNX file runs in onnxruntime. The intermediate values of an engine cannot be read, so the ONNX file it was built
from is built again with the same library, plugin and precision, and with these values as outputs.
"""

from __future__ import annotations

import ast
import operator
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from ...core.documents.engine_sidecar import EngineSidecar
from ...core.errors import CheckFailed, UsageError
from ...core.limits import LARGEST_SIZE
from ...core.storage.files import sha256
from ...core.tensors import BATCH, SEQUENCE
from ...onnx_graph.graph_values import external_files
from ...onnx_graph.judgement import lies_inside
from ...runtime.backends import registry
from ...runtime.session import Session, load
from ..source.source_model import SourceModel
from .request import BisectRequest

_OPERATORS: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def onnx_file_of(model: Path) -> Path:
    """Return the ONNX file to bisect: the model itself, or the file that an engine was built from.

    Raises:
        UsageError: the engine's ONNX file is missing in its folder.
        CheckFailed: that file is not the one the engine was built from.
    """
    sidecar = registry.choose(model)[0].sidecar(model)
    if not isinstance(sidecar, EngineSidecar):
        return model
    path = model.with_name(sidecar.onnx_name)
    if not path.is_file():
        raise UsageError(
            f"{path} is missing.",
            why=f"Bisecting {model.name} needs the ONNX file that it was built from.",
            fix="Copy that file into the engine's folder.",
        )
    if sha256(path) != sidecar.onnx_sha256:
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
        if not lies_inside(name):
            raise UsageError(f"The model's external data file {name} is missing in its folder.")
        _link(source.parent / name, folder / name)
    marked = folder / "marked.onnx"
    marked.write_bytes(document.SerializeToString())
    backend, _ = registry.choose(model)
    if not backend.built:
        return load(marked, provider=request.provider, plugin="none")
    return load(backend.rebuild(model, marked, request.plugin), plugin=request.plugin)


def _link(source: Path, target: Path) -> None:
    """Link a file to another path, or copy it where links are not possible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)  # if the source is a symbolic link, link its target
    except OSError:
        shutil.copyfile(source, target)


def chosen_sizes(source: SourceModel) -> dict[str, int]:
    """Return a batch of one, and a length at which a lost window shows: over two windows, if the file takes it."""
    spans = [window.keys_per_window for window in source.windows if not window.sees_all] or [source.window_size]
    return {BATCH: 1, SEQUENCE: min(source.shapes.seq_len, 2 * max(spans) + 3)}


def fix(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> None:
    """Write numbers in place of names, and of sums and products of names, in the types of all values of a graph.

    Expressions that cannot be computed stay; such a value is not a boundary.
    """
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            size = _number(dimension.dim_param, sizes) if dimension.dim_param else None
            if size is not None and 0 <= size <= LARGEST_SIZE:
                dimension.dim_value = size


def _number(text: str, sizes: Mapping[str, int]) -> int | None:
    """Compute an expression such as `2*batch*seq`; None if it is another kind of text."""
    try:
        return _value(ast.parse(text, mode="eval").body, sizes)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    """Compute a part of an expression; KeyError for anything but a name, a number or an operation of `_OPERATORS`."""
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, sizes)
    if isinstance(node, ast.BinOp):
        found: int = _OPERATORS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
        return found
    raise KeyError(ast.dump(node))
