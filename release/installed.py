"""A wheel in an empty environment, without a compiler on its PATH: what it says of itself there, and what it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class NotRight(Exception):
    """A wheel does not do what it is there for."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    Args:
        folder: where it lies.
        programs: folders of other programs on its PATH, after its own; none has no compiler.
    """

    folder: Path
    programs: tuple[Path, ...] = ()

    @classmethod
    def create(cls, folder: Path, programs: Sequence[Path] = ()) -> Environment:
        """Make one."""
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        return cls(folder, tuple(programs))

    def lend(self, folders: Sequence[Path]) -> None:
        """Let it find the packages in these folders, after its own: what a wheel requires, without the network."""
        packages = Path(self.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        # A path in a .pth is searched after the environment's own packages, and the .pth files in it are not read.
        (packages / "others.pth").write_text("".join(f"{folder}\n" for folder in folders))

    def install(self, *arguments: str) -> None:
        """Install with pip."""
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)

    def run(self, program: str, *arguments: object) -> str:
        """Run one of its programs and return what it prints; NotRight if it fails."""
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        kept = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("PIP_", "SSL_", "HTTP")) or name.lower().endswith("_proxy")
        }
        path = os.pathsep.join(map(str, (self.folder / "bin", *self.programs)))
        environment = {**kept, "PATH": path, "HOME": str(scratch)}
        command = [str(self.folder / "bin" / program), *map(str, arguments)]
        ended = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
        if ended.returncode:
            raise NotRight(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
        return ended.stdout

    def document(self, *arguments: object) -> dict[str, Any]:
        """Run `localattn … --format json` and return what it prints."""
        found: dict[str, Any] = json.loads(self.run("localattn", *arguments, "--format", "json"))
        return found


def check_kernels(environment: Environment) -> dict[str, Any]:
    """Run the demo and its file with the kernels of the installed package, and return what the runs say.

    Raises:
        NotRight: the kernels are not used, or not those of the package.
    """
    checked = environment.document("plugin", "check", "--backend", "onnxruntime")
    demo = environment.document("demo", "--rows", 2, "--max-tokens", 8, "--force")
    few = ("--iterations", 20, "--rounds", 3, "--duration", 0)
    timed = environment.document("bench", "localattn-demo/pybytes.onnx", "--plugin", "none,auto", "--threads", 1, *few)
    run = environment.document("run", "localattn-demo/pybytes.onnx")
    if not (run["plugin"] and Path(run["plugin"]).resolve().is_relative_to(environment.folder.resolve())):
        raise NotRight(f"The kernels of the package are not used: {run['plugin']}")
    if checked["path"] != run["plugin"]:
        raise NotRight(f"{checked['path']} was checked, and {run['plugin']} used")
    return {"checked": checked, "demo": demo, "run": run, "bench": timed}


def check_plugin_library(environment: Environment) -> dict[str, Any]:
    """Find the installed plugin library as `localattn build` does, and return what is in it.

    Raises:
        NotRight: another one is found, or none.
    """
    found = environment.document("plugin", "path")
    if not Path(found["path"]).resolve().is_relative_to(environment.folder.resolve()):
        raise NotRight(f"{found['path']} is found, and not the installed library")
    return found
