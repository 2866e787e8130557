"""How long the first ten commands of docs/getting-started.md take, from `git clone` to a bundle that was checked.

They are run as they are printed, but for the address of the repository, which is that of this checkout. Installing is
left out, for what it takes is the network's: the clone is put in the place of an installed package, and its
dependencies are those of this interpreter.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..machine import ROOT
from ..target import Target

PAGE = ROOT / "docs" / "getting-started.md"
SECTION = "## Ten commands"
ADDRESS = "ADDRESS-OF-THIS-REPOSITORY"
# "Ten minutes to success", installing included; this leaves it half of that.
LIMIT_SECONDS = 300.0


def commands(page: Path = PAGE) -> list[str]:
    """The commands of the page's section, comments left out."""
    section = page.read_text(encoding="utf-8").partition(SECTION)[2]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None, f"{page} has no commands below {SECTION!r}"
    return [line for line in block[1].splitlines() if shlex.split(line, comments=True)]


def is_install(command: str) -> bool:
    """Whether a command installs packages."""
    return "pip install" in command


def follow(folder: Path, tell: Callable[[str], None] = lambda _: None) -> Iterator[tuple[str, float, str]]:
    """Run the commands one after the other, in a shell as a user's: each with its seconds and what it printed.

    Args:
        folder: an empty folder.
        tell: told each command as it begins.

    Raises:
        AssertionError: one failed.
    """
    programs, place = folder / "programs", folder / "told"
    programs.mkdir()
    for name in ("python3", "python"):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (programs / "localattn").write_text(f"#!{sys.executable}\nfrom localattn.cli import main\n\nmain()\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),  # the clone is called as the package is
        # The repository may be of another user.
        **{"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"},
    }
    here = folder
    for command in commands():
        if is_install(command):
            continue
        tell(command)
        begin = time.perf_counter()
        # The folder that a command leaves the shell in is that of the next one.
        line = f"{command.replace(ADDRESS, shlex.quote(str(ROOT)))}\npwd > {shlex.quote(str(place))}"
        ended = subprocess.run(["sh", "-ec", line], cwd=here, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        here = Path(place.read_text(encoding="utf-8").strip())
        yield command, seconds, ended.stdout


def measure(tell: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark as it is stored: one run, as a user's first."""
    with TemporaryDirectory() as name:
        took = [(command, round(seconds, 2)) for command, seconds, _ in follow(Path(name), tell)]
    whole = sum(seconds for _, seconds in took)
    return {
        "commands": [{"command": command, "seconds": seconds} for command, seconds in took],
        "not_measured": [command for command in commands() if is_install(command)],
        "seconds": round(whole, 2),
        # More than its processors is a busy machine, whose figures say little.
        "load_average": round(os.getloadavg()[0], 1),
        "targets": [Target("all commands but installing, seconds", whole, LIMIT_SECONDS).to_dict()],
    }
