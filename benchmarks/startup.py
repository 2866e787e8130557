"""How long the command line and the runtime package take to start, and that neither imports a giant."""

from __future__ import annotations

import math
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .clock import interleave
from .machine import ROOT
from .target import Target

LIMIT_SECONDS = 0.3
GIANTS = ("torch", "onnxruntime", "tensorrt")
_SCRIPT = str(Path(sysconfig.get_path("scripts")) / "localattn")

# By name, what follows the interpreter.
COMMANDS = {
    "an empty Python": ["-c", "pass"],
    "import localattn.runtime": ["-c", "import localattn.runtime"],
    "localattn --help": [_SCRIPT, "--help"],
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
    tell("Looking at what is imported")
    for name, arguments in COMMANDS.items():
        giants = imported(arguments) & set(GIANTS)
        assert not giants, f"{name} imports {', '.join(sorted(giants))}"
    tell("Starting")
    runs = {name: lambda a=arguments: lambda: _start(a) for name, arguments in COMMANDS.items()}
    measured = interleave(runs, samples=samples, least=samples, seconds=seconds)
    targets = [Target(f"{name}, seconds", measured.timings[name].median, LIMIT_SECONDS) for name in list(COMMANDS)[1:]]
    return {
        "samples": measured.samples,
        "others_cpu": None if math.isnan(measured.others) else round(measured.others, 3),
        "commands": {name: timing.in_milliseconds() for name, timing in measured.timings.items()},
        "never_imported": list(GIANTS),
        "targets": [target.to_dict() for target in targets],
    }


def imported(arguments: list[str]) -> set[str]:
    """Top-level packages that a command imports, by Python's own account (`-X importtime`)."""
    done = _start(arguments, "-X", "importtime")
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


def _start(arguments: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, *arguments]
    return subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
