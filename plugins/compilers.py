"""Find a C++17 compiler for a processor: an installed one, or Zig's Clang in the package `ziglang`.

Zig's has the C libraries of every system in it. So it needs nothing of this machine, and makes libraries for old
systems and for other processors.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from ..core.errors import MissingDependency, UsageError
from ..core.machine.processor import Arch

_log = logging.getLogger(__name__)

# Commands in the order of trial; the first that compiles for the processor is used.
_COMMANDS: dict[Arch, tuple[str, ...]] = {
    "x86_64": ("g++", "x86_64-linux-gnu-g++", "clang++"),
    "aarch64": ("g++", "aarch64-linux-gnu-g++", "clang++"),
}
_PACKAGES: dict[Arch, str] = {"x86_64": "g++-x86-64-linux-gnu", "aarch64": "g++-aarch64-linux-gnu"}

System = Literal["linux", "macos", "windows"]
# Zig's names of the target systems. With the glibc of 2012, libraries are manylinux2014's, which pip
# installs on every Linux that Python 3.10 runs on; the oldest macOS is the first for Arm.
_ZIG_TARGETS: dict[tuple[Arch, System], str] = {
    ("x86_64", "linux"): "x86_64-linux-gnu.2.17",
    ("aarch64", "linux"): "aarch64-linux-gnu.2.17",
    ("aarch64", "macos"): "aarch64-macos.11.0",
    ("x86_64", "windows"): "x86_64-windows-gnu",
}
_INSTALL_ZIG = "pip install 'localattn[compiler]'"


@dataclass(frozen=True)
class Compiler:
    """A compiler.

    Args:
        command: the words that run it, with the options from `CXX`.
        version: first line of its `--version`.
        runtime: options that link the C++ library into the output.
    """

    command: tuple[str, ...]
    version: str
    runtime: tuple[str, ...] = ("-static-libstdc++",)


def find_compiler(arch: Arch) -> Compiler:
    """Find a compiler for `arch`: `$CXX` if it compiles for it, else GCC or Clang, native or cross, else Zig's.

    Raises:
        UsageError: `$CXX` cannot be split into words, or cannot be run.
        MissingDependency: there is no compiler.
    """
    tried = []
    try:
        given = tuple(shlex.split(os.environ.get("CXX", "")))
    except ValueError as error:
        raise UsageError("CXX is not a valid command.", why=f"{error}.", fix="Write it as in a shell.") from error
    for command in ((given,) if given else ()) + tuple((name,) for name in _COMMANDS[arch]):
        if shutil.which(command[0]) is None:
            if command == given:
                raise UsageError(f"The compiler {command[0]} cannot be found.", why="CXX names it.")
            continue
        machine = _ask(command, "-dumpmachine")
        _log.debug("%s makes code for %s", " ".join(command), machine or "an unknown machine")
        if machine.split("-")[0] == arch:
            found = Compiler(command, _ask(command, "--version"))
            _log.info("compiler for %s: %s", arch, found.version)
            return found
        tried.append(f"{' '.join(command)} is for {machine or 'an unknown machine'}")
    try:
        return zig_compiler(arch)
    except MissingDependency as missing:
        package = f"apt-get install {_PACKAGES[arch]} (on a {arch} machine: g++)"
        raise MissingDependency(
            f"There is no C++ compiler for {arch}.",
            why="; ".join(tried) + "." if tried else "Neither GCC nor Clang is installed, nor the package ziglang.",
            fix=f"Install one: {_INSTALL_ZIG}, or {package}; or set CXX to another compiler.",
        ) from missing


def zig_compiler(arch: Arch, system: System = "linux") -> Compiler:
    """Return Zig's compiler for a processor and system.

    Raises:
        MissingDependency: the package ziglang is not installed.
    """
    try:
        release = metadata.version("ziglang")
    except metadata.PackageNotFoundError as error:
        raise MissingDependency("The package ziglang is not installed.", fix=f"Install it: {_INSTALL_ZIG}") from error
    target = _ZIG_TARGETS[arch, system]
    found = Compiler((sys.executable, "-m", "ziglang", "c++", "-target", target), f"zig {release} for {target}", ())
    _log.info("compiler for %s: %s", arch, found.version)
    return found


def _ask(command: tuple[str, ...], option: str) -> str:
    """Return the first line that the compiler prints for an option; empty if it fails, or does not end."""
    try:
        finished = subprocess.run([*command, option], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return finished.stdout.strip().splitlines()[0] if finished.returncode == 0 and finished.stdout.strip() else ""
