"""List the packages of the tests that pip cannot install as an extra, because their own dependencies must stay out."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import NamedTuple


class Package(NamedTuple):
    """A package from PyPI, installed with `--no-deps`."""

    name: str
    version: str
    purpose: str
    everywhere: bool  # False where some systems have no wheel of it


PACKAGES = (
    Package("labml-nn", "0.5.1", "models are compared with it", True),
    Package("zetascale", "2.8.8", "models are compared with it", True),
    Package("nvidia-pytriton", "0.7.0", "a Triton server; wheels need glibc 2.35", False),
)


def missing() -> list[Package]:
    """Find the packages that are not installed in the pinned version."""
    return [package for package in PACKAGES if _installed(package.name) != package.version]


def install(packages: list[Package]) -> None:
    """Install packages into this environment; raise CalledProcessError where pip fails on one that every system has."""
    for package in packages:
        requirement = f"{package.name}=={package.version}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", requirement]
        if subprocess.run(command, check=package.everywhere).returncode:
            print(f"Not installed: {requirement} ({package.purpose}). Its tests are skipped.", file=sys.stderr)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
