"""How long the command line and the runtime package take to start, and that neither imports a giant.

`localattn run` is held against a plain script that does what a user would write instead: import onnxruntime, open the
file, run it once. Both include the model's own loading and run, so their difference is what the command adds.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from localattn.commands.supervisor.supervise import ONE_PROCESS

from ..clock import interleave
from ..machine import ROOT
from ..target import Target

LIMIT_SECONDS = 0.3
GIANTS = ("torch", "onnxruntime", "tensorrt")
# What `localattn run` may not import beside onnxruntime, and onnx, whose parser reads every file.
GIANTS_OF_RUN = ("torch", "tensorrt")
_SCRIPT = str(Path(sysconfig.get_path("scripts")) / "localattn")
_PLAIN = """
import sys
import numpy
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
tokens = session.get_inputs()[0]
session.run(None, {tokens.name: numpy.zeros(tokens.shape, numpy.int64)})
"""

# By name, what follows the interpreter.
COMMANDS = {
    "an empty Python": ["-c", "pass"],
    "import localattn.runtime": ["-c", "import localattn.runtime"],
    "localattn --help": [_SCRIPT, "--help"],
}
RUN, PLAIN_RUN = "localattn run MODEL", "onnxruntime alone, the same MODEL"


def of_model(model: Path) -> dict[str, list[str]]:
    """The two ways to run a model."""
    return {
        PLAIN_RUN: ["-c", _PLAIN, str(model)],
        RUN: [_SCRIPT, "run", str(model), "--provider", "cpu"],
    }


def measure(samples: int, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark as it is stored.

    Args:
        samples: samples of each command, of several starts each.
        seconds: how long to wait for calm ones.
        tell: told each step.

    Raises:
        AssertionError: a command imports a giant.
    """
    from localattn.demo import checkpoint_path

    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model.onnx"
        tell(f"Exporting {checkpoint_path().name}")
        _start([_SCRIPT, "export", str(checkpoint_path()), "-o", str(model)])
        return _measure(COMMANDS | of_model(model), samples, seconds, tell)


def _measure(
    commands: Mapping[str, list[str]], samples: int, seconds: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    tell("Looking at what is imported")
    for name, arguments in commands.items():
        giants = imported(arguments) & set(GIANTS if name in COMMANDS else GIANTS_OF_RUN)
        assert not giants, f"{name} imports {', '.join(sorted(giants))}"
    tell("Starting")
    runs = {name: lambda a=arguments: lambda: _start(a) for name, arguments in commands.items()}
    measured = interleave(runs, samples=samples, least=samples, seconds=seconds)
    took = {name: timing.median for name, timing in measured.timings.items()}
    targets = [Target(f"{name}, seconds", took[name], LIMIT_SECONDS) for name in list(COMMANDS)[1:]]
    targets.append(Target(f"{RUN} beyond {PLAIN_RUN}, seconds", took[RUN] - took[PLAIN_RUN], LIMIT_SECONDS))
    return {
        "samples": measured.samples,
        "others_cpu": None if math.isnan(measured.others) else round(measured.others, 3),
        "commands": {name: timing.in_milliseconds() for name, timing in measured.timings.items()},
        "never_imported": list(GIANTS),
        "never_imported_by_run": list(GIANTS_OF_RUN),
        "targets": [target.to_dict() for target in targets],
    }


def imported(arguments: list[str]) -> set[str]:
    """Top-level packages that a command imports, by Python's own account (`-X importtime`), in one process."""
    done = _start(arguments, "-X", "importtime", environment={ONE_PROCESS: "1"})
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


def _start(
    arguments: list[str], *options: str, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT.parent, env=variables, capture_output=True, text=True, check=True)
