"""README and docs/: their commands run, their links lead somewhere, and the reference is that of the code."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer

from localattn.cli import command_line

from ..conftest import Finished, save_upstream
from ..support import tokenizer_folder
from ..support.models import step_model

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
GUIDE = ROOT / "docs" / "getting-started.md"
Run = Callable[..., Finished]
# Options in backticks that are Triton's, or a script's of this repository.
FOREIGN = {"--backend-config", "--exit-on-error", "--http-address", "--model-repository", "--slow"}
# An option that a recipe adds.
FOREIGN |= {"--producer-name"}
# What the pages say of paths that are elsewhere, or not there yet.
ELSEWHERE = {"plugins/x86_64/", "plugins/aarch64/", "benchmarks/results/gpu.json"}
# What recipes add, what a page lets its reader write, and a script of DeepSpeed.
ELSEWHERE |= {"tagger.py", "exporter/checks/node_names.py", "phi3.py", "runtime/backends/toy/", "zero_to_fp32.py"}


class Block(NamedTuple):
    """A fenced block: its language, its text, and what a comment just before it says."""

    language: str
    text: str
    remark: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"(?:<!-- ([^\n]*) -->\n)?```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [Block(language, text, remark) for remark, language, text in found]


def lines(block: Block) -> list[str]:
    return [line for line in block.text.replace("\\\n", " ").splitlines() if shlex.split(line, comments=True)]


def perform(block: Block, localattn: Run, namespace: dict[str, Any]) -> None:
    """Do what a block says, in the current folder; every command must end well."""
    if block.language == "python":
        exec(compile(block.text, "<block>", "exec"), namespace)
        return
    for line in lines(block):
        words = shlex.split(line, comments=True)
        # What `generate` writes are bytes, of any kind, which the fixture cannot hold.
        if words[0] == "localattn" and not {"generate", "|", "&&", ">"} & set(words):
            finished = localattn(*words[1:])
            assert finished.code == 0, f"{line}: {finished.err}"
        else:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            environment = {**os.environ, "PATH": path}
            ended = subprocess.run(["bash", "-ec", line], env=environment, capture_output=True, check=False)
            assert ended.returncode == 0, f"{line}: {ended.stderr.decode()}"


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in ("sh", "python") and not block.remark]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_getting_started_works_as_written(folder: Path, localattn: Run) -> None:
    namespace: dict[str, Any] = {}
    for block in runnable(GUIDE):
        perform(block, localattn, namespace)
    assert {path.name for path in folder.iterdir()} >= {"model.onnx", "parity.html", "model_step.onnx", "bundle.tar"}


def test_a_model_of_your_own_works_as_written(folder: Path, localattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One export, and everything that follows from its file."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "tagger", raising=False)
    page = ROOT / "docs" / "own-model.md"
    (code,) = (block for block in blocks(page) if block.remark == "file: tagger.py")
    (folder / "tagger.py").write_text(code.text)
    namespace: dict[str, Any] = {}
    for block in runnable(page):
        perform(block, localattn, namespace)
    sys.modules.pop("tagger", None)
    assert {path.name for path in folder.iterdir()} >= {"tagger.onnx", "tagger_fp16.onnx", "golden.npz", "tagger.tar"}


def test_the_functions_of_python_work_as_written(folder: Path, localattn: Run) -> None:
    """In order, on one model."""
    ran, namespace = [block for block in blocks(ROOT / "docs" / "api.md") if block.language == "python"], {}
    for block in ran:
        needed = block.remark.removeprefix("needs: ").split()
        if all(importlib.util.find_spec(name) is not None for name in needed):
            perform(block, localattn, namespace)
    assert {path.name for path in folder.iterdir()} >= {"golden.npz", "model.onnx", "step.prefill.onnx", "tagger.onnx"}
    import localattn as package

    functions = {name for name in package.__all__ if name.islower() and name not in ("errors", "__version__")}
    for name in functions - {"replace_local_attention"}:
        assert any(f"localattn.{name}(" in block.text for block in ran), name


def test_loops_over_a_step_file_work_as_written(
    tmp_path: Path, localattn: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of docs/streaming.md: one on a model of bytes, one on a model with a tokenizer."""
    ran = [block for block in blocks(ROOT / "docs" / "streaming.md") if block.language == "python"]
    for block in ran:
        needed = block.remark.removeprefix("needs: ").split()
        if any(importlib.util.find_spec(name) is None for name in needed):
            continue
        folder = tmp_path / ("text" if needed else "bytes")
        folder.mkdir()
        step_model.write(folder, vocabulary=tokenizer_folder.VOCABULARY if needed else 256)
        if needed:
            tokenizer_folder.write(folder)
        monkeypatch.chdir(folder)
        perform(block, localattn, {})
        shown = capsys.readouterr().out
        assert len(shown.strip()) >= 20 and (needed or shown.split()[-1] == "24")
    assert len(ran) == 2


def test_its_engine_is_built(folder: Path, localattn: Run) -> None:
    (engine,) = (block for block in blocks(GUIDE) if block.remark.startswith("needs: "))
    for name in engine.remark.split()[1:]:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    namespace: dict[str, Any] = {}
    first, *_ = (block for block in runnable(GUIDE) if block.language == "python")
    export, *_ = (block for block in runnable(GUIDE) if "localattn export" in block.text)
    for block in (first, export, engine):
        perform(block, localattn, namespace)
    assert (folder / "model.engine.json").is_file()


def test_readme_works_as_written(folder: Path, localattn: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run against a small model at the names and the length that the page uses."""
    import numpy as np

    sizes = {"num_tokens": 256, "max_seq_len": 1024, "dim": 16, "depth": 1, "causal": True}
    sizes |= {"local_attn_window_size": 16, "heads": 2, "dim_head": 8}
    save_upstream(folder, "local_attention.LocalTransformer", sizes)
    tokens = np.arange(1024, dtype=np.int64)[None] % 256
    np.savez(folder / "in.npz", tokens=tokens)
    (folder / "my_package").mkdir()
    source = f"from local_attention import LocalTransformer\n\ndef build():\n    return LocalTransformer(**{sizes})\n"
    (folder / "my_package" / "model.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    ran = runnable(ROOT / "README.md")
    for block in ran:
        perform(block, localattn, {"tokens": tokens})
    assert len(ran) >= 3


def test_what_fails_is_noticed(folder: Path, localattn: Run) -> None:
    for text in ("localattn inspect nowhere.pt\n", "false\n"):
        with pytest.raises(AssertionError):
            perform(Block("sh", text, ""), localattn, {})


def test_every_block_that_is_not_run_says_why() -> None:
    for page in (ROOT / "README.md", GUIDE):
        remarks = [block.remark for block in blocks(page) if block.remark]
        assert remarks and all(re.match(r"(not run|needs): \w", remark) for remark in remarks)


def command_lines() -> list[str]:
    """Every line of every page that begins with localattn."""
    pages = [page for page in PAGES if page.name != "commands.md"]
    found = [
        line for page in pages for block in blocks(page) for line in lines(block) if block.language in ("sh", "bash")
    ]
    return list(dict.fromkeys(line for line in found if line.startswith("localattn ")))


@pytest.mark.parametrize("line", command_lines())
def test_commands_are_understood(line: str) -> None:
    """Parsed as the command line does, and not run."""
    rest = shlex.split(line.replace("[--", "--").partition(" | ")[0], comments=True)[1:]
    node: Any = typer.main.get_command(command_line())
    while hasattr(node, "commands"):
        if rest[0] not in node.commands:
            assert node.name == "bundle", f"{rest[0]} is no command"
            rest.insert(0, "create")
        node = node.commands[rest.pop(0)]
    if rest:
        node.make_context(node.name, rest)


@pytest.mark.parametrize("name", NAMES)
def test_shells_read_the_same_words(name: str) -> None:
    """What zsh would take for a pattern, or for the path of a program, is quoted."""
    for block in blocks(ROOT / name):
        for line in lines(block) if block.language in ("sh", "bash") else ():
            bare = re.sub(r"'[^']*'|\"[^\"]*\"|\s#.*", "", line)
            assert not re.search(r"[\[\]*?!]|(^|\s)=", bare), line


def known_options() -> set[str]:
    nodes, found = [typer.main.get_command(command_line())], {"--help"}
    while nodes:
        node: Any = nodes.pop()
        nodes += getattr(node, "commands", {}).values()
        found |= {flag for parameter in node.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return found


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text))


@pytest.mark.parametrize("name", NAMES)
def test_options_that_are_mentioned_exist(name: str) -> None:
    """Ours stand alone in backticks, or after localattn; those of other programs in a line that begins with these."""
    page = ROOT / name
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    code = re.findall(r"`([^`\n]+)`", text) + [line for block in blocks(page) for line in block.text.splitlines()]
    ours = {option for part in code if part.startswith(("--", "localattn ")) for option in options_in(part)}
    others = {option for part in code if not part.startswith(("--", "localattn ")) for option in options_in(part)}
    assert ours - others - FOREIGN <= known_options()


def slug(heading: str) -> str:
    """The anchor GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), link


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_mentioned_exist(name: str) -> None:
    """Paths in backticks that begin with a folder of the repository, and names of Python files anywhere in it."""
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and re.fullmatch(r"[a-z]+", path.name))
    for path in re.findall(rf"`((?:{folders})/[\w./-]*)", text):
        assert (ROOT / path).exists() or path in ELSEWHERE, path
    for python in re.findall(r"`(\w+\.py)`", text):
        assert python in ELSEWHERE or any(ROOT.rglob(python)), python


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_that_of_the_code() -> None:
    made = generator()
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run: python docs/generate.py"


def test_the_reference_has_every_command_and_option() -> None:
    """What Typer parses is what the reference, which reads signatures, lists."""
    root: Any = typer.main.get_command(command_line())
    parsed = {}
    for name, node in root.commands.items():
        for inner, command in getattr(node, "commands", {"": node}).items():
            flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
            parsed[f"{name} {inner}".strip()] = {flag for flag in flags if flag.startswith("-")}
    shared = {"-v", "--verbose", "-q", "--quiet", "-h", "--help"}
    listed = {
        command.words: {name for parameter in command.parameters if parameter.is_option for name in parameter.names}
        for command in generator().commands()
        if command.words not in ("plugin", "bundle")
    }
    assert listed == {name: flags - shared for name, flags in parsed.items()}


def test_every_option_is_explained() -> None:
    for command in generator().commands():
        assert command.paragraphs[0].endswith("."), command.words
        for parameter in command.parameters:
            assert parameter.help and parameter.help[-1] in ".)", f"{command.words} {parameter.names}"


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert {page.name for page in PAGES if page.parent.name == "docs"} - {"index.md"} <= set(
        re.findall(r"\(([\w-]+\.md)\)", index)
    )


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [name for name in typer.main.get_command(command_line()).commands if f"localattn {name}" not in text]  # type: ignore[attr-defined]
