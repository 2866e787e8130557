"""docs/deploy.md: its commands exist, and its C++ program builds, and ends with a message where it cannot run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from ctypes.util import find_library
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


# What a build needs here: a compiler, and both headers, as the plugin library does.
NATIVE = Path(__file__).parents[1] / "simulators" / "native" / "no_runtime.cpp"
(PROGRAM,) = (block for kind, block in BLOCKS if kind == "cpp")
(BUILDS,) = (block for kind, block in BLOCKS if kind == "sh" and block.startswith("g++"))
needs_headers = pytest.mark.skipif(
    shutil.which("g++") is None or find_spec("kernel_lens") is None, reason="g++ or TensorRT's headers are missing"
)


def trees(folder: Path, cudart: Path | None) -> dict[str, str]:
    """The two folders that the page's commands name, with real headers; and the page's program.

    Args:
        folder: where they are made.
        cudart: the real libcudart; None for a stand-in that sees a GPU.
    """
    from localattn.plugins.library.headers import find_cuda_headers, find_tensorrt_headers
    from localattn.plugins.library.sidecar import host_arch

    headers = {"tensorrt": find_tensorrt_headers(host_arch()).folder, "cuda": find_cuda_headers(host_arch()).folder}
    libraries = {"tensorrt": folder / "tensorrt" / "lib", "cuda": folder / "cuda" / "lib64"}
    for name, place in libraries.items():
        place.mkdir(parents=True)
        (folder / name / "include").symlink_to(headers[name])
    stand_in = ["g++", "-shared", "-fPIC", "-isystem", str(headers["cuda"]), str(NATIVE), "-o"]
    subprocess.run([*stand_in, str(libraries["tensorrt"] / "libnvinfer.so")], check=True)
    if cudart is None:
        subprocess.run([*stand_in, str(libraries["cuda"] / "libcudart.so"), "-DCUDART"], check=True)
    else:
        for name in ("libcudart.so", cudart.name):
            (libraries["cuda"] / name).symlink_to(cudart)
    (folder / "main.cpp").write_text(PROGRAM)
    return {**os.environ, "TENSORRT_ROOT": str(folder / "tensorrt"), "CUDA_HOME": str(folder / "cuda")}


@needs_headers
def test_its_program_has_no_warnings(tmp_path: Path) -> None:
    environment = trees(tmp_path, None)
    includes = ["-isystem", "tensorrt/include", "-isystem", "cuda/include"]
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-fsyntax-only", *includes, "main.cpp"]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")


@needs_headers
@pytest.mark.parametrize(
    ("real", "said"),
    [(True, "no NVIDIA driver that fits"), (False, "TensorRT does not start")],
    ids=["no driver", "null"],
)
def test_its_program_builds_as_written_and_ends_with_a_message(real: bool, said: str, tmp_path: Path) -> None:
    """The page's own lines, with the folders that it names."""
    cudart = None
    if real:
        wheel = find_spec("nvidia")
        places = [] if wheel is None else [Path(place) for place in wheel.submodule_search_locations or ()]
        cudart = next((file for place in places for file in place.glob("*/lib/libcudart.so.*")), None)
        if cudart is None or find_library("cuda") is not None:
            pytest.skip("it needs libcudart, of a wheel of NVIDIA's, and no driver")
    ended = subprocess.run(
        ["sh", "-c", BUILDS], cwd=tmp_path, env=trees(tmp_path, cudart), capture_output=True, text=True
    )
    assert ended.returncode == 1 and ended.stdout == "", ended.stderr
    assert [line for line in ended.stderr.splitlines() if line.startswith("Error: ")][-1].startswith(f"Error: {said}")
