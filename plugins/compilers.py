"""Find a C++17 compiler for the processor asked for."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass

from ..core.errors import MissingDependency, UsageError
from ..core.machine.processor import Arch

_log = logging.getLogger(__name__)

# Commands in the order they are tried; the first that compiles for the processor is taken.
_COMMANDS: dict[Arch, tuple[str, ...]] = {
    "x86_64": ("g++", "x86_64-linux-gnu-g++", "clang++"),
    "aarch64": ("g++", "aarch64-linux-gnu-g++", "clang++"),
}
_PACKAGES: dict[Arch, str] = {"x86_64": "g++-x86-64-linux-gnu", "aarch64": "g++-aarch64-linux-gnu"}


@dataclass(frozen=True)
class Compiler:
    """A compiler.

    Args:
        command: the words that run it, with the options from `CXX`.
        version: first line of its `--version`.
    """

    command: tuple[str, ...]
    version: str


def find_compiler(arch: Arch) -> Compiler:
    """Find a compiler for `arch`: `$CXX` if it compiles for it, else GCC or Clang, native or cross.

    Raises:
        UsageError: `$CXX` cannot be split into words, or cannot be run.
        MissingDependency: there is none.
    """
    tried = []
    try:
        given = tuple(shlex.split(os.environ.get("CXX", "")))
    except ValueError as error:
        raise UsageError("CXX is no command.", why=f"{error}.", fix="Write it as a shell would take it.") from error
    for command in ((given,) if given else ()) + tuple((name,) for name in _COMMANDS[arch]):
        if shutil.which(command[0]) is None:
            if command == given:
                raise UsageError(f"The compiler {command[0]} cannot be found.", why="It is named by CXX.")
            continue
        machine = _ask(command, "-dumpmachine")
        _log.debug("%s makes code for %s", " ".join(command), machine or "an unknown machine")
        if machine.split("-")[0] == arch:
            found = Compiler(command, _ask(command, "--version"))
            _log.info("compiler for %s: %s", arch, found.version)
            return found
        tried.append(f"{' '.join(command)} is for {machine or 'an unknown machine'}")
    raise MissingDependency(
        f"There is no C++ compiler for {arch}.",
        why="; ".join(tried) + "." if tried else "Neither GCC nor Clang is installed.",
        fix=f"Install one: apt-get install {_PACKAGES[arch]} (on a {arch} machine: g++), or name yours in CXX.",
    )


def _ask(command: tuple[str, ...], option: str) -> str:
    """Return the first line that the compiler prints for an option; empty if it fails."""
    try:
        finished = subprocess.run([*command, option], capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return finished.stdout.strip().splitlines()[0] if finished.returncode == 0 and finished.stdout.strip() else ""
