"""What is said to type next works: every `Next:` line, every option that code names, every advice in an error."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import localattn as package
from localattn.cli import command_line
from localattn.commands.parts.flags import _OPTIONS, flag
from localattn.commands.parts.terminal.help import FORMER

from ..conftest import TINY, Finished, save_upstream
from ..support.own_module import tagger
from ..support.terminal import Terminal, following

Command = Callable[..., Finished]
ROOT = Path(package.__file__).parent
SOURCES = [
    path
    for folder in ("commands", "core", "demo", "doctor", "exporter", "onnx_graph", "plugins", "reports", "runtime")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# Options of other programs that texts name: hf, http.server and git lfs.
FOREIGN = {"--local-dir", "--directory", "--include", "--model-type", "--loader", "--saver", "--load-dir", "--save-dir"}
FOREIGN |= {"--target-tensor-parallel-size", "--target-pipeline-parallel-size", "--onnx", "--ignore-scripts"}
FOREIGN |= {"--exit-on-error", "--backend-config", "--model-repository"}  # Triton's
FOREIGN |= {"--http-address", "--grpc-address", "--metrics-address"}
# Words of an error that stand in backticks and are no arguments.
NO_ARGUMENTS = {"load", "save", "run", "record", "export", "parity", "inspect", "true", "false", "forward"}


def options() -> set[str]:
    root: Any = typer.main.get_command(command_line())
    nodes = [command for node in root.commands.values() for command in getattr(node, "commands", {"": node}).values()]
    found = {name for node in (root, *nodes) for x in node.params for name in (*x.opts, *x.secondary_opts)}
    return found | {name for names in FORMER.values() for name in names} | {"--help", "--install-completion"}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def calls(name: str) -> Iterator[tuple[Path, ast.Call]]:
    """Every call of a function of this name in the product's code."""
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == name:
                yield path, node


def texts(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def test_every_argument_that_an_error_names_is_an_option() -> None:
    known = options() | set(_OPTIONS.values())
    named = [(path, node.args[0].value) for path, node in calls("argument") if isinstance(node.args[0], ast.Constant)]
    assert len(named) > 150
    for path, name in named:
        assert flag(name).split()[0] in known, (path, name)


def test_every_option_that_a_text_names_is_one() -> None:
    known = options()
    for path in SOURCES:
        for text in texts(tree(path)):
            in_words = "--" in text and " " in text and "localattn" not in text
            if not in_words or path.name in ("package.py", "install_hints.py"):
                continue
            for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*…-])", text):
                assert name in known | FOREIGN, (path, name, text)


def test_no_text_in_backticks_becomes_an_option_that_is_none() -> None:
    """`save_pretrained` in an error would be shown as --save-pretrained."""
    known = options() | set(_OPTIONS.values())
    for kind in ("UsageError", "CheckFailed", "ExportFailed", "MissingDependency", "BuildFailed"):
        for path, node in calls(kind):
            for text in texts(node):
                for name in re.findall(r"`([a-z][a-z0-9_]*)(?:=[^`]*)?`", text):
                    assert flag(name).split()[0] in known or name in NO_ARGUMENTS, (path, name)


def test_every_line_that_code_suggests_names_a_command() -> None:
    root: Any = typer.main.get_command(command_line())
    names = set(root.commands) | {"--help", "--version", "-h"}
    for path in SOURCES:
        for text in texts(tree(path)):
            for word in re.findall(r"`localattn ([a-z]+)|: localattn ([a-z]+)", text):
                assert "".join(word) in names, (path, text)


# --- advice that is followed --------------------------------------------------------------------------------------

DENSE = """from torch import nn


class Dense(nn.Module):
    def forward(self, frames):
        return (frames @ frames.mT) @ frames
"""
OWN = "--factory tagger.py:build --weights epoch.ckpt --checks quick"
# What is typed, and a word of what is said; whatever it says to do is then done.
ADVICE = {
    "a file that exists": ("export model.pt -o model.onnx --checks quick", "--force"),
    "a length that is open": (f"export {OWN} --input 'frames:float32:[1,seq,6]' -o o.onnx", "--seq-len 128"),
    "a chunk of whole sequences": ("export model.pt -o s.onnx --chunk 1 --checks quick", "--mode step"),
    "golden outputs as a checkpoint": ("parity own.onnx --against golden.npz", "--golden golden.npz"),
    "an open axis of a step file": (
        "export model.pt --mode step --dynamic seq -o s.onnx --chunk 1", "Leave --dynamic out"
    ),
    "a whole file as a step file": ("generate model.onnx --prompt-ids 1,2", "localattn export model.pt --mode step"),
    "an own whole file as a step file": ("generate own.onnx --prompt-ids 1", "--factory tagger.py:build"),
    "a file for bisect": ("bisect model.onnx --against model.onnx", "localattn parity model.onnx --against model.onnx"),
    "an own module elsewhere": ("parity own.onnx --against epoch.ckpt", "--factory"),
    "a part of a command": ("verify model.tar", "localattn bundle verify"),
    "tensors that grow": (
        "export --factory dense.py:Dense --input 'frames:float32:[1,40,6]' -o d.onnx", "--allow-quadratic"
    ),
    "a bundle that exists": ("bundle model.onnx -o model.tar --samples 1", "--force"),
    "a difference": ("parity model.onnx --against model.pt --atol 0 --rtol 0 --seeds 1", "raise --atol"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, its file and bundle, and an own module with its file."""
    made = tmp_path_factory.mktemp("advice")
    for name in ("model.pt", "fresh.pt"):
        save_upstream(made, "local_attention.LocalTransformer", TINY, name)
    package.export(made / "model.pt", made / "model.onnx", checks="quick")
    package.bundle(made / "model.onnx", made / "model.tar", samples=1)
    for name in ("tagger.py", "epoch.ckpt"):
        shutil.copy(tagger() / name, made / name)
    (made / "dense.py").write_text(DENSE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        patch.syspath_prepend(made)
        module, origin = _module()
        package.export_module(module, ["frames:float32:[1,24,6]"], "own.onnx", origin=origin, checks="quick")
        package.record(module, {"frames": torch.randn(1, 24, 6)}, "golden.npz")
    return made


def _module() -> Any:
    from localattn.exporter.user_module.factory import module_from_factory

    return module_from_factory("tagger.py:build", None, Path("epoch.ckpt"))


def followed(words: list[str], said: str) -> list[str]:
    """What an error says to type, in place of some words."""
    line = re.search(r"localattn ((?:bundle verify|[a-z]+)(?: (?:'[^']*'|\S)+)*)", said)
    if line is not None:
        typed = shlex.split(line[1].rstrip(".?"))
        return typed if len(typed) > 2 else [*typed, *words[1:]]
    changed = list(words)
    for name, value in re.findall(r"(--[a-z-]+)(?: ([\w/.]+(?:,[\w/.]+)*))?", said):
        if re.search(rf"[Ll]eave {name}|[Ll]eave out {name}", said):
            place = changed.index(name)
            del changed[place : place + 2]
            continue
        if value in ("needs", "goes"):
            continue
        value = {"or": "1", "to": "", "out": ""}.get(value, value.rstrip("."))
        if name == "--rtol":
            value = "1"
        if name in changed:
            del changed[changed.index(name) : changed.index(name) + 2]
        if name == "--golden":
            del changed[changed.index("--against") : changed.index("--against") + 2]
        changed += [name, value] if value else [name]
        if name == "--mode":
            break
    return changed


@pytest.mark.parametrize("name", ADVICE)
def test_advice_is_followed(
    name: str, folder: Path, tmp_path: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, said = ADVICE[name]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    refused = localattn(*shlex.split(line))
    assert refused.code != 0
    told = (refused.err + refused.out).replace("│", " ")
    assert said in told, told
    place = next(text for text in reversed(told.splitlines()) if said.split()[-1] in text)
    done = localattn(*followed(shlex.split(line), place))
    assert done.code == 0, (followed(shlex.split(line), place), done.err)
    for path in (*folder.glob("[osd].onnx*"), *folder.glob("model_step*")):
        path.unlink()


# --- every line that says what is next ----------------------------------------------------------------------------

QUICK = {"bench": " --duration 0 --iterations 1 --rounds 2 --warmup 0", "generate": " --max-tokens 2"}
# Where each walk begins. Its command's `Next:` is typed, and that one's, and so on.
WALKS = (
    "localattn export model.pt --mode step --chunk 1 -o a_step.onnx --checks quick",
    f"localattn export {OWN} --input 'frames:float32:[1,24,6]' -o mine.onnx",
    f"localattn export {OWN} --input 'frames:float32:[1,24,6]' -o dry.onnx --dry-run",
    f"localattn export {OWN} --input 'frames:float32:[1,seq=24,6]' --mode step -o mine_step.onnx",
    "localattn inspect epoch.ckpt --factory tagger.py:build",
    "localattn inspect fresh.pt",
    "localattn convert model.onnx -o plain.onnx --standard-ops",
    "localattn parity own.onnx --golden golden.npz",
    "localattn bisect model.onnx --against model.pt",
    "localattn demo --rows 1 --max-tokens 0",
    "localattn doctor",
    "localattn plugin list",
)
# Commands whose line needs what not every machine has.
ELSEWHERE = {"build": "TensorRT", "plugin": "a compiler, and tests of its own (tests/commands/test_plugin_command.py)"}


def walk(terminal: Terminal, folder: Path, line: str, verbs: set[str]) -> None:
    """Type a line and what each result says to type next, until nothing is said or it was typed before."""
    typed: set[str] = set()
    while line not in typed and line.split()[1] not in ELSEWHERE:
        typed.add(line)
        verb = line.split()[1]
        again = re.search(r" -o (\S+)$", line)  # a file that the fixture or another walk has made
        force = " --force" if again and (folder / again[1]).exists() else ""
        code, shown = terminal.run(line + QUICK.get(verb, "") + force)
        assert code == 0, (line, shown)
        if "Next: " not in shown:
            return
        verbs.add(verb)
        line = following(shown)


@pytest.mark.slow
def test_every_next_line_works(folder: Path) -> None:
    terminal, verbs = Terminal(folder), set[str]()
    try:
        for line in WALKS:
            walk(terminal, folder, line, verbs)
    finally:
        terminal.close()
    saying = {path.stem for path, _ in calls("suggest")} | {path.stem for path, _ in calls("show")}
    commands = {path.stem for path in (ROOT / "commands").glob("*.py")}
    assert saying & commands - {*ELSEWHERE, "__init__"} <= verbs, (saying & commands) - verbs
