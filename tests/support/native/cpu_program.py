"""C++ programs of `sources/` that are linked with the CPU kernels, without onnxruntime.

They are called with files of cases: the same way natively, under sanitizers, emulated, and with a fault put into the
sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import localattn
from localattn.plugins.library.sidecar import Arch, host_arch

from ..run_folder import once
from .plugin_build import compiler, emulator, folder, source_file

KERNEL_SOURCES = Path(localattn.__file__).parent / "plugins" / "cpu" / "source"
INSTRUCTION_SETS = {"x86_64": ("avx512", "avx2", "baseline"), "aarch64": ("neon", "baseline")}[host_arch()]
ELEMENTS = ("fp32", "fp16")
NUMPY: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16}
# What speaks with onnxruntime.
_NODES = {"nodes", "onnxruntime", "operators.cpp"}


@cache
def program(source: str, arch: Arch, *flags: str, sources: Path = KERNEL_SOURCES) -> Path:
    """One C++ file with the kernels of `sources`."""
    kernels = [file for file in sorted(sources.rglob("*.cpp")) if file.relative_to(sources).parts[0] not in _NODES]
    files = [source_file(source), *kernels]
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    objects = [_object(file, arch, *options, f"-I{sources}") for file in files]
    command = [*compiler(arch).command, *options, "-static-libstdc++", *map(str, objects)]

    def link(place: Path) -> None:
        subprocess.run([*command, "-o", str(place / "program")], check=True)

    return once(f"program-{_digest(command)}", link) / "program"


def _object(file: Path, arch: Arch, *options: str) -> Path:
    """One C++ file compiled, once for all whose text is the same with what they include, whichever folder has them."""
    command = [*compiler(arch).command, *options]
    text = subprocess.run([*command, "-E", "-P", str(file)], capture_output=True, check=True).stdout

    def compiled(place: Path) -> None:
        subprocess.run([*command, "-c", str(file), "-o", str(place / "object.o")], check=True)

    flags = [option for option in command if not option.startswith("-I")]
    return once(f"object-{_digest(flags, text)}", compiled) / "object.o"


def _digest(command: Sequence[str], text: bytes = b"") -> str:
    return hashlib.sha256(repr(command).encode() + text).hexdigest()[:32]


@cache
def tool(source: str) -> Path:
    """One C++ file that runs other programs here."""
    output = folder() / Path(source).stem
    command = [*compiler(host_arch()).command, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, source_file(source), "-o", output], check=True)
    return output


def sanitized(source: str, flags: str, level: str = "-O1") -> Path:
    """The program with a sanitizer, or the test is skipped."""
    try:
        return program(source, host_arch(), level, "-g1", "-fno-sanitize-recover=all", f"-fsanitize={flags}")
    except subprocess.CalledProcessError:
        pytest.skip(f"this compiler has no -fsanitize={flags}")


def mutated(folder: Path, file: str, right: str, wrong: str) -> Path:
    """A copy of the kernels' sources in which one line says something else."""
    copy = folder / "source"
    shutil.copytree(KERNEL_SOURCES, copy)
    (changed,) = copy.rglob(file)
    text = changed.read_text()
    assert text.count(right) == 1, (file, right)
    changed.write_text(text.replace(right, wrong))
    return copy


@dataclass(frozen=True)
class Program:
    """A program, and what it shall run with. A class for each file of `sources/`, its `source`."""

    source: ClassVar[str]

    executable: Path
    arch: Arch
    environment: tuple[tuple[str, str], ...] = ()

    @classmethod
    def here(cls, instruction_set: str | None = None) -> Any:
        """On this machine, with the instruction set it takes by itself or with this one; skips the test without it."""
        environment = () if instruction_set is None else with_instructions(instruction_set)
        made = cls(program(cls.source, host_arch(), "-O3"), host_arch(), environment)
        if instruction_set is not None:
            made._demand(instruction_set)
        return made

    def call(self, *arguments: object, **environment: str) -> str:
        command = [*emulator(self.arch), str(self.executable), *map(str, arguments)]
        env = {**os.environ, **dict(self.environment), **environment}
        finished = subprocess.run(command, env=env, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    def _demand(self, instruction_set: str) -> None:
        """Skip the test if this processor does not have what the environment asks for."""
        if json.loads(self.call(os.devnull, os.devnull))["isa"] != instruction_set:
            pytest.skip(f"this processor has no {instruction_set}")


def with_instructions(name: str) -> tuple[tuple[str, str], ...]:
    """The environment in which an instruction set is used, if there is it."""
    return (("LOCALATTN_CPU_ISA", name),)
