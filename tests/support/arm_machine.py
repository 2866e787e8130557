"""An Arm machine to test on: Debian's Python for arm64 and wheels for aarch64, emulated by qemu.

The emulated processor is a Cortex-A76, which computes in fp16 as those of a Jetson Orin do. Programs see a
/proc/cpuinfo of their own, for onnxruntime 1.29 and later does not survive that of another processor.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from ..conftest import Finished

PYTHON = "python3.11"
# onnxruntime's release stands in the folder's name: a newer one is fetched anew.
ONNXRUNTIME = os.environ.get("LOCALATTN_TEST_ARM_ONNXRUNTIME", "1.31.1")
_PACKAGES = (
    "libc6", "libstdc++6", "libgcc-s1", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5",
    "libsqlite3-0", "libuuid1", "libcrypt1", f"{PYTHON}-minimal", f"lib{PYTHON}-minimal", f"lib{PYTHON}-stdlib", PYTHON,
)  # fmt: skip
_WHEELS = ("numpy", "onnx", "pydantic", "rich", "typer", f"onnxruntime=={ONNXRUNTIME}")
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")
_CPUINFO = """processor\t: {}
BogoMIPS\t: 62.50
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0b
CPU revision\t: 1

"""


@dataclass(frozen=True)
class ArmMachine:
    """Its Python, a program of this machine that starts the emulator, and the environment that it runs in."""

    program: Path
    environment: dict[str, str]

    def python(self, *arguments: object) -> Finished:
        """Run its Python."""
        command = [str(part) for part in (self.program, *arguments)]
        ended = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=900)
        return Finished(ended.returncode, ended.stdout, ended.stderr)

    def localattn(self, *arguments: object) -> Finished:
        """Run the command line; the processes that it starts are of the Arm machine too."""
        start = f"import sys; sys.executable = {str(self.program)!r}; from localattn.cli import main; main()"
        return self.python("-c", start, *arguments)


@cache
def arm_machine(store: Path, scratch: Path) -> ArmMachine:
    """The machine, fetched into `store` once; the test is skipped where it cannot be had.

    Args:
        store: folder that stays from run to run.
        scratch: a new folder.
    """
    for program in ("qemu-aarch64", "apt-get", "dpkg"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    folder = store / f"arm-onnxruntime-{ONNXRUNTIME}"
    if not folder.is_dir():
        making = scratch / "making"
        _root(making / "root", scratch / "apt")
        _site(making / "site")
        shutil.copytree(making, folder, symlinks=True)
    import localattn

    for part in ("site", "cache"):
        (scratch / part).mkdir()
    for package in (folder / "site").iterdir():
        (scratch / "site" / package.name).symlink_to(package)
    (scratch / "site" / "localattn").symlink_to(Path(localattn.__file__).parent)
    program, root = scratch / "python", folder / "root"
    program.write_text(f'#!/bin/sh\nexec qemu-aarch64 -cpu cortex-a76 -L {root} {root}/usr/bin/{PYTHON} "$@"\n')
    program.chmod(0o755)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONHOME": str(root / "usr"),
        "PYTHONPATH": str(scratch / "site"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "OPENBLAS_NUM_THREADS": "1",
    }
    return ArmMachine(program, environment)


def _root(root: Path, apt: Path) -> None:
    """Debian's packages, fetched with an apt that knows arm64 and whose lists are its own."""
    for part in ("state/lists/partial", "cache/archives/partial", "packages"):
        (apt / part).mkdir(parents=True)
    status = "/var/lib/dpkg/status"
    options = [f"-oDir::State={apt / 'state'}", f"-oDir::State::status={status}", f"-oDir::Cache={apt / 'cache'}"]
    options += ["-oAPT::Architectures::=amd64", "-oAPT::Architectures::=arm64"]
    _fetch(["apt-get", *options, "update"], apt)
    _fetch(["apt-get", *options, "download", *(f"{name}:arm64" for name in _PACKAGES)], apt / "packages")
    root.mkdir(parents=True)
    for package in (apt / "packages").iterdir():
        subprocess.run(["dpkg", "-x", package, root], check=True)
    (root / "proc").mkdir()
    (root / "proc" / "cpuinfo").write_text("".join(_CPUINFO.format(index) for index in range(2)))


def _site(site: Path) -> None:
    options = ["--quiet", "--only-binary=:all:", "--disable-pip-version-check", "--implementation=cp"]
    options += [f"--python-version={PYTHON.removeprefix('python')}", *(f"--platform={name}" for name in _PLATFORMS)]
    _fetch([sys.executable, "-m", "pip", "install", *options, f"--target={site}", *_WHEELS], site.parent)


def _fetch(command: list[str], folder: Path) -> None:
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if finished.returncode:
        lines = [line for line in finished.stderr.splitlines() if line.startswith(("E:", "ERROR"))]
        pytest.skip(f"the Arm machine cannot be fetched: {(lines or ['no reason given'])[-1]}")
