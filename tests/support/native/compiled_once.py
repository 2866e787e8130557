"""In place of the compiler of `localattn.plugins.shared_library`: each library is compiled once a run, then copied."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ..run_folder import once


class _NotMade(Exception):
    """The compiler made no library, so the next one to ask runs it again."""


def run(command: list[str], *, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, for a command that compiles the files of a folder into one library."""
    output = Path(command[command.index("-o") + 1])
    finished = subprocess.CompletedProcess(command, 0, "", "")

    def make(place: Path) -> None:
        nonlocal finished
        finished = subprocess.run(command, cwd=cwd, **options)
        if finished.returncode or not output.is_file():
            raise _NotMade
        shutil.copyfile(output, place / "library")

    try:
        made = once(f"library-{_digest(command, cwd, output)}", make) / "library"
    except _NotMade:
        return finished
    if not output.exists():
        shutil.copyfile(made, output)
        os.umask(mask := os.umask(0))
        output.chmod(0o777 & ~mask)
    return finished


def _digest(command: list[str], folder: Path, output: Path) -> str:
    """Of the compiler, its options and every file of the folder."""
    digest = hashlib.sha256(repr([shutil.which(command[0]), *command]).replace(str(output), "").encode())
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]
