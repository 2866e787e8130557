"""docs/deploy.md: its commands exist, and its C++ program compiles."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from localattn.cli import command_line

TEXT = (Path(__file__).parents[3] / "docs" / "deploy.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
LINES = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
COMMANDS = [shlex.split(line, comments=True)[1:] for line in LINES if line.startswith("localattn ")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_its_commands_are_understood(command: list[str]) -> None:
    """Parsed as the command line does, and not run."""
    node = typer.main.get_command(command_line())
    name, *rest = command
    node = node.commands[name]  # type: ignore[attr-defined]
    if hasattr(node, "commands"):
        name, *rest = rest
        node = node.commands[name]
    node.make_context(name, rest)


def test_an_unknown_option_would_be_noticed() -> None:
    with pytest.raises(Exception, match="no-such-option"):
        test_its_commands_are_understood(["build", "model.onnx", "--no-such-option"])


@pytest.mark.skipif(
    shutil.which("g++") is None or find_spec("kernel_lens") is None, reason="g++ or TensorRT's headers are missing"
)
def test_its_program_compiles(tmp_path: Path) -> None:
    from localattn.plugins.library.facts import host_arch
    from localattn.plugins.library.headers import find_cuda_headers, find_tensorrt_headers

    (program,) = (block for kind, block in BLOCKS if kind == "cpp")
    (tmp_path / "main.cpp").write_text(program)
    folders = (find_tensorrt_headers(host_arch()).folder, find_cuda_headers(host_arch()).folder)
    includes = [word for folder in folders for word in ("-isystem", str(folder))]
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-fsyntax-only", *includes, "main.cpp"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")
