"""Each table stands once: names of providers, element types, axes and versions, and what only a family knows."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from localattn.core.dtypes import NUMPY_NAME
from localattn.exporter.models.registry import CLASSES, FAMILIES

from .test_architecture import ROOT, SOURCES

# These run where the package is not: on a device, or in a process that must survive what it imports.
ALONE = {"runtime/bundle/device/verify.py", "runtime/bundle/readme.py", "doctor/probe_process.py"}
# A check of a library of kernels, in the oldest onnxruntime that takes it.
ALONE |= {"plugins/cpu/check.py", "runtime/bundle/serving/stream_model.py"}


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    files = {path.relative_to(ROOT).as_posix(): path for path in SOURCES}
    return [
        (name, node)
        for name, path in files.items()
        if name not in ALONE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant | ast.Dict | ast.Assign | ast.Compare | ast.Subscript | ast.Match)
    ]


def strings(node: ast.AST) -> set[str]:
    return {x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)}


def test_names_of_execution_providers() -> None:
    names = {"CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"}
    written = {file for file, node in nodes() if isinstance(node, ast.Constant) and node.value in names}
    assert written == set()  # core/machine/execution_providers.py puts them together


def test_element_types() -> None:
    """No dictionary but that of core/dtypes.py leads from our names of element types to numpy's, or back."""
    short, long = set(NUMPY_NAME), set(NUMPY_NAME.values())
    found = set()
    for file, node in nodes():
        if not isinstance(node, ast.Dict):
            continue
        pairs = [(k.value, v.value) for k, v in zip(node.keys, node.values, strict=True) if is_text(k) and is_text(v)]
        if any({a, b} & short and {a, b} & long for a, b in pairs):
            found.add(file)
    assert found == {"core/dtypes.py"}


def is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize(
    ("names", "home"),
    [
        ({"BATCH", "SEQUENCE", "BATCH_AXES", "SEQUENCE_AXES"}, "core/tensors.py"),
        ({"OPSETS", "DEFAULT_OPSET", "IR_VERSION", "OLDEST_ONNXRUNTIME", "_OPSET", "_IR_VERSION"}, "core/versions.py"),
    ],
)
def test_axes_and_versions(names: set[str], home: str) -> None:
    assigned = {
        file
        for file, node in nodes()
        if isinstance(node, ast.Assign)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and name.id in names
    }
    assert assigned == {home}


def test_nothing_outside_a_family_compares_its_names() -> None:
    """Classes and families are told apart by what their rows say, not by what they are called."""
    names = {*CLASSES, *(name.split(".")[1] for name in CLASSES), *(family.name for family in FAMILIES)}
    names -= {"attention"}  # a family's name, and the word for what every module here computes
    named = {
        (file, node.lineno)
        for file, node in nodes()
        if not file.startswith("exporter/models/")
        and isinstance(node, ast.Compare | ast.Subscript | ast.Dict | ast.Match)
        and strings(node) & names
    }
    assert named == set()
