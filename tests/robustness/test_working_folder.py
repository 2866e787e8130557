"""`python -m localattn` in a stranger's folder imports nothing from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PLANTED = ("numpy", "json", "logging", "onnxruntime", "typer", "rich", "select", "mmap", "ctypes", "faulthandler")


@pytest.mark.parametrize("module", ["localattn", "localattn.cli"])
def test_modules_of_the_working_folder_are_not_imported(tmp_path: Path, module: str) -> None:
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    command = [sys.executable, "-m", module, "doctor", "--require", "nothing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_another_module_keeps_its_working_folder(tmp_path: Path) -> None:
    """A tool that imports localattn as it is found needs the modules beside it."""
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__init__.py").write_text("import localattn\n")
    (tmp_path / "tool" / "__main__.py").write_text("import beside\n")
    (tmp_path / "beside.py").write_text("print('found')\n")
    command = [sys.executable, "-m", "tool", "localattn"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "found\n", done.stderr
