"""Errors of the library name arguments, and the command line shows its own options in their place."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localattn.commands.parts.flags import flag, in_flags
from localattn.core.error_texts import argument, first_line, named_line

from ..conftest import Finished
from ..project.test_docs import known_options

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ("core", "onnx_graph", "exporter", "runtime", "plugins", "reports", "demo")
# Programs of their own with their own options, or what a command prints as its result.
OWN = {
    "exporter/user_module/dynamic_axes.py",  # shows an input as it is typed, quoted for the shell
    "plugins/compilers.py",
    "plugins/kernel/budget.py",
    "plugins/kernel/compile.py",
    "plugins/shared_library.py",
    "runtime/bench/cautions.py",
    "runtime/bundle/readme.py",
}
# A text may tell a whole command, with its options.
COMMAND = re.compile(
    r"localattn (?!\{)|hf download|how_to_build|trtexec|pip install|--system-site-packages|git lfs|npm install"
    r"|http\.server|python -m verl|python tools/checkpoint"
)
Command = Callable[..., Finished]


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in LIBRARY:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name not in OWN and "runtime/bundle/device/" not in name:
                yield name, ast.parse(path.read_text())


def texts(tree: ast.Module) -> Iterator[str]:
    """Every text that is no docstring; one in parts is one text."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _documents(node)
    }
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
        id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | parts
        ):
            yield ast.unparse(node)


def _documents(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> bool:
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)


def test_no_text_of_the_library_names_an_option() -> None:
    found = {
        (name, text)
        for name, tree in sources()
        for text in texts(tree)
        if re.search(r"(?<![\w-])--[a-z]", text) and not COMMAND.search(text)
    }
    assert found == set()


def test_every_argument_that_is_named_has_an_option() -> None:
    named = {
        node.args[0].value
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("argument", "needs_argument")
        and isinstance(node.args[0], ast.Constant)
    }
    assert len(named) > 30
    assert {name for name in named if flag(name).startswith("-")} >= named - {"checkpoint", "model"}
    assert {flag(name) for name in named} - known_options() == set()


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (argument("overwrite", True), "--force"),
        (argument("function_body", False), "--no-function-body"),
        (argument("seq_len"), "--seq-len"),
        (argument("seq_len", 64), "--seq-len 64"),
        (argument("dynamic", ("batch", "seq")), "--dynamic batch,seq"),
        (argument("dynamic", ()), "--dynamic none"),
        (argument("mode", "step"), "--mode step"),
        ("`localattn inspect`", "`localattn inspect`"),
    ],
)
def test_arguments_become_options(written: str, shown: str) -> None:
    assert in_flags(f"Add {written}.") == f"Add {shown}."


def test_of_an_error_the_first_line_is_shown() -> None:
    error = ValueError("\n  what happened \nand a trace")
    assert (first_line(error), first_line(error, 4)) == ("what happened ", "what")
    assert named_line(error, 13) == "ValueError: what happened"
    assert (first_line(OSError()), named_line(OSError())) == ("OSError", "OSError: no message")


def test_each_names_its_own(tiny: Path, localattn: Command) -> None:
    import localattn as package

    report = package.export(tiny)
    with pytest.raises(package.UsageError, match="`overwrite=True`"):
        package.export(tiny, report.path)
    ended = localattn("export", tiny)
    assert ended.code == 2 and "--force" in ended.err and "`overwrite" not in ended.err
    with pytest.raises(package.UsageError, match="`seq_len=65`"):
        package.export(tiny, seq_len=65, overwrite=True)
    ended = localattn("export", tiny, "--seq-len", 65, "--force")
    assert ended.code == 2 and "--seq-len 65" in ended.err and "`" not in ended.err
