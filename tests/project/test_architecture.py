"""The structure of the package: which way imports point, that no rooms form a circle, and what importing costs.

A room is a file or folder directly inside a folder; an arrow says that some file of one room imports another room,
wherever the import stands: at the top, inside a function, or for type checking alone.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from localattn.runtime.backends import registry

ROOT = Path(__file__).resolve().parents[2]
# A package may import those in its own entry, and itself.
ALLOWED = {
    "core": set(),
    "onnx_graph": {"core"},
    "plugins": {"core", "onnx_graph"},
    "runtime": {"core", "onnx_graph"},
    "doctor": {"core", "runtime"},
    "reports": {"core"},
    "exporter": {"core", "onnx_graph", "plugins", "runtime"},
    "demo": {"core", "exporter", "runtime"},
    "commands": {
        "core",
        "demo",
        "doctor",
        "exporter",
        "onnx_graph",
        "plugins",
        "reports",
        "runtime",
    },
}
HEAVY = (
    "torch",
    "onnxruntime",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "tensorrt",
    "numpy",
    "pydantic",
    "rich.console",
)
Module = tuple[str, ...]
SOURCES = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


def module_of(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(source: str, here: Module, is_package: bool, known: frozenset[Module]) -> set[Module]:
    """The modules of this project that a file imports; `known` tells a module from a name in one."""
    package = here if is_package else here[:-1]
    found: set[Module] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if not node.level and module[:1] != ("localattn",):
                continue
            base = (*package[: len(package) - node.level + 1], *module) if node.level else module[1:]
            found |= {(*base, x.name) if (*base, x.name) in known else base for x in node.names}
        elif isinstance(node, ast.Import):
            names = (tuple(alias.name.split(".")) for alias in node.names)
            found |= {name[1:] for name in names if name[0] == "localattn"}
        elif isinstance(node, ast.Call):
            found |= {module for module in called_for(node, package, known) if module}
    return found - {here}


def called_for(node: ast.Call, package: Module, known: frozenset[Module]) -> set[Module]:
    """The module that `import_module("...")` names; of an f-string, the last package before its first placeholder."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called not in ("import_module", "__import__") or not node.args:
        return set()
    name = node.args[0]
    first = name.values[0] if isinstance(name, ast.JoinedStr) and name.values else name
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return set()
    text = first.value
    level = len(text) - len(text.lstrip("."))
    parts = tuple(part for part in text.split(".") if part)
    if not level and parts[:1] != ("localattn",):
        return set()
    module = (*package[: len(package) - level + 1], *parts) if level else parts[1:]
    while module and module not in known:
        module = module[:-1]
    return {module}


@cache
def graph() -> Mapping[Module, frozenset[Module]]:
    """Every file of the package with what it imports."""
    known = frozenset(module_of(path)[:end] for path in SOURCES for end in range(1, 9))
    return {
        module_of(path): frozenset(imports_of(path.read_text(), module_of(path), path.name == "__init__.py", known))
        for path in SOURCES
    }


def rooms_and_arrows(folder: Module) -> tuple[set[str], set[tuple[str, str]]]:
    """The rooms directly inside a folder, and who imports whom."""
    depth = len(folder)
    rooms = {module[depth] for module in graph() if module[:depth] == folder and len(module) > depth}
    arrows = {
        (module[depth], other[depth])
        for module, others in graph().items()
        for other in others
        if module[:depth] == other[:depth] == folder and min(len(module), len(other)) > depth
    }
    return rooms, {(first, second) for first, second in arrows if first != second}


def circle(arrows: set[tuple[str, str]]) -> list[str]:
    """The rooms that are left when those without a way on are taken away, again and again."""
    left = set(arrows)
    while ends := {second for _, second in left} - {first for first, _ in left}:
        left = {arrow for arrow in left if arrow[1] not in ends}
    return sorted({room for arrow in left for room in arrow})


def folders() -> Iterator[Module]:
    for path in SOURCES:
        if path.name == "__init__.py":
            yield module_of(path)


@pytest.mark.parametrize("package", ALLOWED)
def test_arrows_point_one_way(package: str) -> None:
    upward = {
        f"{'.'.join(module)} imports {'.'.join(other)}"
        for module, others in graph().items()
        for other in others
        if module[0] == package and other[:1] and other[0] not in ALLOWED[package] | {package}
    }
    assert upward == set()


@pytest.mark.parametrize("folder", sorted(set(folders())), ids=".".join)
def test_no_rooms_import_each_other_in_a_circle(folder: Module) -> None:
    assert circle(rooms_and_arrows(folder)[1]) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_say_what_they_are_about(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_nothing_outside_a_family_names_its_arguments() -> None:
    families = ROOT / "exporter" / "models"
    names = {
        node.name
        for path in families.glob("*/arguments.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    assert len(names) >= 4
    outside = [path for path in SOURCES if families not in path.parents]
    named = {
        (path.name, node.id)
        for path in outside
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id in names
    }
    assert named == set()


def test_what_differs_between_runtimes_is_a_method_of_its_backend() -> None:
    names = {*registry.ROWS, *registry.suffixes()} | {f"{name}:" for name in registry.ROWS}
    compared = {
        f"{path.relative_to(ROOT)}: {constant.value}"
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] in ("runtime", "doctor", "exporter", "reports")
        and ROOT / "runtime" / "backends" not in path.parents
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant) and constant.value in names
    }
    # Triton has backends of its own, of the same names; a bundle's scripts travel without the package.
    assert {place for place in compared if "runtime/bundle/" not in place} == set()


def test_what_is_for_engines_alone_is_imported_by_engines_alone() -> None:
    """Everybody else asks the table of runtimes: who has no GPU may skip these folders."""
    own = {("runtime", "backends", registry.ROWS[backend.name]) for backend in registry.builders()}
    assert len(own) == 2
    importers = {
        f"{'.'.join(module)} imports {'.'.join(other)}"
        for module, others in graph().items()
        for other in others
        if other[:3] in own and module[:3] not in own
    }
    assert importers == set()


def test_imports_are_found_wherever_they_stand() -> None:
    source = (
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nimport localattn.core.errors\n"
        "if TYPE_CHECKING:\n    from ..core import files\ndef f():\n    from .session import load\n"
    )
    known = frozenset({("core",), ("core", "files"), ("runtime", "session"), ("core", "errors")})
    found = imports_of(source, ("runtime", "x"), False, known)
    assert found == {("core", "errors"), ("core", "files"), ("runtime", "session")}
    by_name = (
        "from importlib import import_module\nimport importlib\n"
        "import_module('...core.errors', __package__)\nimportlib.import_module(f'..{x}.session', __package__)\n"
        "import_module('tensorrt')\nimport_module(f'localattn.core.{x}')\n__import__('localattn.runtime.session')\n"
        "import_module(f'..core.{x}.errors', __package__)\n"
    )
    package = frozenset({*known, ("plugins",)})
    assert imports_of(by_name, ("plugins", "cpu", "x"), False, package) == {
        ("core", "errors"),
        ("plugins",),
        ("core",),
        ("runtime", "session"),
    }
    assert circle({("a", "b"), ("b", "c"), ("c", "b")}) == ["a", "b", "c"]
    assert circle({("a", "b"), ("b", "c"), ("a", "c")}) == []


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("localattn", (*HEAVY, "typer")),
        ("localattn.cli", HEAVY),
        ("localattn.commands.api.exporting", (*HEAVY, "typer")),
        ("localattn.commands.api.comparing", (*HEAVY, "typer")),
        ("localattn.commands.api.building", (*HEAVY, "typer")),
        ("localattn.runtime", HEAVY),
        ("localattn.doctor.abilities", HEAVY),  # it asks every backend
        ("localattn.runtime.session", ("torch", "onnxruntime", "onnx", "pydantic")),
        ("localattn.runtime.inputs.arrays", ("torch", "onnxruntime")),
        ("localattn.runtime.parity.comparison", ("torch", "onnxruntime")),
        ("localattn.onnx_graph.summary", ("torch", "onnxruntime")),
        ("localattn.core.documents.sidecar", ("torch", "onnxruntime", "onnx")),
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
