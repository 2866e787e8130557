"""An environment of its own for each runtime and tool, from PyPI and npm, kept in a cache folder.

`LOCALATTN_RUNTIMES` names the folder; by default it is in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..support.arm_machine import ArmMachine, arm_machine
from ..support.browser import BROWSER

_RUNNERS = Path(__file__).parent / "runners"
_LONGEST = 900.0  # seconds


@dataclass(frozen=True)
class Environment:
    """What a runtime needs, and how it is run.

    Args:
        title: the column of the table.
        packages: from PyPI as "name==version", or from npm as "name@version".
        script: the runner, and what it is given first.
        program: "own" for the Python of the environment; "node"; "tests" for the Python of the tests, which has
            PyTorch, and drives a browser; or "arm" for the Python of the emulated Arm machine, which has onnxruntime.
        wrong: why it may be wrong without an error, which the page says; empty where that would be a fault here.
    """

    title: str
    packages: tuple[str, ...]
    script: tuple[str, ...]
    program: str = "own"
    wrong: str = ""

    @property
    def npm(self) -> bool:
        """Whether the packages are from npm."""
        return any("@" in package for package in self.packages)

    @property
    def browser(self) -> bool:
        """Whether it runs in a browser."""
        return self.npm and self.program == "tests"


_NODE = ("onnxruntime-node@1.30.0", "onnxruntime-web@1.30.0")
RUNTIMES = {
    "onnxruntime-1.20": Environment("onnxruntime 1.20", ("onnxruntime==1.20.0", "numpy<2.3"), ("run_onnxruntime.py",)),
    "onnxruntime": Environment("onnxruntime", ("onnxruntime==1.32.0", "numpy"), ("run_onnxruntime.py",)),
    "node": Environment("onnxruntime-node", _NODE, ("run.cjs", "onnxruntime-node"), program="node"),
    "web": Environment("onnxruntime-web (wasm, node)", _NODE, ("run.cjs", "onnxruntime-web"), program="node"),
    "browser": Environment("onnxruntime-web (wasm, Chromium)", _NODE, ("run_browser.py", "wasm"), program="tests"),
    "webgpu": Environment("onnxruntime-web (WebGPU, Chromium)", _NODE, ("run_browser.py", "webgpu"), program="tests"),
    "openvino": Environment("OpenVINO", ("openvino==2026.4.1", "numpy"), ("run_openvino.py",)),
    "openvino-provider": Environment(
        "onnxruntime + OpenVINO",
        ("onnxruntime==1.32.0", "onnxruntime-ep-openvino==1.8.1"),
        ("run_openvino_provider.py",),
    ),
    "tract": Environment("tract", ("tract==0.23.9", "numpy"), ("run_tract.py",)),
    "iree": Environment("IREE", ("iree-base-compiler[onnx]==3.13.0", "iree-base-runtime==3.13.0"), ("run_iree.py",)),
    "mnn": Environment(
        "MNN",
        ("MNN==3.6.1", "numpy"),
        ("run_mnn.py",),
        wrong="it takes ReduceL2 over all axes, whichever are given, and Gelu as its approximation with tanh",
    ),
    "reference": Environment("onnx.reference", ("onnx==1.23.2",), ("run_reference.py",)),
}
_ORT = ("onnxruntime==1.32.0", "onnx==1.23.2", "numpy")


def _tool(title: str, name: str, *packages: str) -> Environment:
    return Environment(title, (*_ORT, *packages), ("run_tool.py", name))


TOOLS = {
    "onnxsim": _tool("onnxsim", "onnxsim", "onnxsim==0.8.1"),
    "onnxslim": _tool("onnxslim", "onnxslim", "onnxslim==0.1.98"),
    "version_converter": _tool("onnx.version_converter to opset 21", "version_converter"),
    "quantize_dynamic": _tool("onnxruntime quantize_dynamic", "quantize_dynamic", "sympy"),
    # It imports torch, whatever it is given.
    "optimizer": Environment("onnxruntime.transformers optimizer", (), ("run_tool.py", "optimizer"), program="tests"),
    "polygraphy": _tool("polygraphy", "polygraphy", "polygraphy==0.53.6", "onnx-graphsurgeon==0.6.1"),
    "ort": _tool("ORT format", "ort"),
}


class Absent(Exception):
    """An environment cannot be made here: the network, node or npm is missing."""


def run(
    name: str, cases: Path, kinds: tuple[str, ...] = (), environment: Environment | None = None
) -> dict[str, object]:
    """Run the cases of a folder in a runtime: version, and by kind and form the largest error or why it failed.

    Raises:
        Absent: its environment cannot be made.
    """
    asked = environment or (RUNTIMES | TOOLS)[name]
    if asked.browser and BROWSER is None:
        raise Absent("Chromium is not installed")
    folder = made(asked)
    script, *first = asked.script
    with tempfile.TemporaryDirectory() as scratch:
        variables = {"PATH": os.environ["PATH"], "HOME": str(folder)}
        programs = {"own": str(folder / "bin" / "python"), "tests": sys.executable}
        if asked.program == "arm":
            machine = _arm(folder, Path(scratch))
            programs["arm"], variables = str(machine.program), variables | machine.environment
        program = ["node"] if asked.program == "node" else [programs[asked.program], "-W", "ignore"]
        finished = subprocess.run(
            [*program, str(_RUNNERS / script), *first, str(cases.resolve()), *kinds],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_LONGEST,
            env=variables,
            check=False,
        )
    try:
        answer: dict[str, Any] = json.loads(finished.stdout)
    except ValueError:
        raise RuntimeError(f"{name} ended with {finished.returncode}: {finished.stderr[-2000:]}") from None
    return answer


def _arm(folder: Path, scratch: Path) -> ArmMachine:
    """The emulated Arm machine, fetched into a folder once."""
    try:
        return arm_machine(folder, scratch)
    except pytest.skip.Exception as error:
        raise Absent(str(error)) from error


def made(asked: Environment) -> Path:
    """The folder of an environment, made where it is not there yet."""
    cache = Path(os.environ.get("LOCALATTN_RUNTIMES") or Path.home() / ".cache" / "localattn-runtimes")
    digest = hashlib.sha256("\n".join((*asked.packages, sys.version)).encode()).hexdigest()[:8]
    folder = cache / f"{'npm' if asked.npm else 'python'}-{digest}"
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if asked.npm:
            if shutil.which("node") is None or shutil.which("npm") is None:
                raise Absent("node and npm are not installed")
            (folder / "package.json").write_text('{"private": true}')
            # The scripts of onnxruntime-node fetch GPU libraries, which nothing here needs.
            _quietly(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *asked.packages], folder)
        elif asked.packages:
            venv.create(folder, with_pip=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _quietly([*pip, *asked.packages], folder)
    except subprocess.SubprocessError as error:
        raise Absent(f"{', '.join(asked.packages)} cannot be installed: {str(error)[-300:]}") from error
    (folder / "complete").touch()
    return folder


def _quietly(command: list[str], folder: Path) -> None:
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_LONGEST, check=False)
    if finished.returncode:
        raise subprocess.SubprocessError(finished.stderr)
