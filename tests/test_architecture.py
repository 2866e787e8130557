"""The arrows between the packages, and what importing them costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A package may import those to its right in its own entry, and itself.
ALLOWED = {
    "core": set(),
    "onnx_graph": {"core"},
    "plugins": {"core", "onnx_graph"},
    "runtime": {"core", "onnx_graph"},
    "reports": {"core"},
    "exporter": {"core", "onnx_graph", "plugins", "runtime"},
    "demo": {"core", "exporter", "runtime"},
    "commands": {"core", "onnx_graph", "exporter", "plugins", "reports", "runtime", "demo"},
}
HEAVY = ("torch", "onnxruntime", "onnx", "onnx_ir", "onnxscript", "tensorrt", "numpy", "pydantic", "rich.console")
SOURCES = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


def imported_packages(path: Path) -> set[str]:
    """Packages of this project that a file imports by relative imports."""
    depth = len(path.relative_to(ROOT).parts) - 1
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth + 1:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return found & ALLOWED.keys()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    assert imported_packages(path) <= ALLOWED[package] | {package}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 420
    assert ast.get_docstring(ast.parse(text)), "the docstring says what the file is about"


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("localattn.cli", HEAVY),
        ("localattn.runtime", HEAVY),
        ("localattn.runtime.session", ("torch", "onnxruntime", "onnx", "pydantic")),
        ("localattn.runtime.arrays", ("torch", "onnxruntime")),
        ("localattn.runtime.parity.comparison", ("torch", "onnxruntime")),
        ("localattn.onnx_graph.facts", ("torch", "onnxruntime")),
        ("localattn.core.sidecar", ("torch", "onnxruntime", "onnx")),
    ],
)
def test_imports_are_light(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    import localattn

    for name in localattn.__all__:
        assert getattr(localattn, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = localattn.no_such_name
