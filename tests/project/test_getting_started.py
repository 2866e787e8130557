"""The ten commands at the top of docs/getting-started.md: run literally, from a clone to a checked bundle."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from localattn.benchmarks.cases.getting_started import ADDRESS, commands, follow, is_install
from localattn.benchmarks.machine import ROOT

pytest.importorskip("onnxruntime", reason="the exported file is run")


def is_repository() -> bool:
    git = shutil.which("git")
    asked = ["git", "-c", "safe.directory=*", "rev-parse", "--verify", "HEAD"]
    return git is not None and subprocess.run(asked, cwd=ROOT, capture_output=True).returncode == 0


def test_there_are_ten_and_they_begin_with_the_clone() -> None:
    lines = commands()
    assert len(lines) <= 10 and lines[0] == f"git clone {ADDRESS} localattn"
    assert sum(map(is_install, lines)) == 1
    assert not any(sign in line for line in lines for sign in ("&&", ";", "|")), "one line is one command"


@pytest.mark.slow
@pytest.mark.skipif(not is_repository(), reason="this is no clone of a repository that git can clone")
def test_they_work_as_written(tmp_path: Path) -> None:
    printed = {command: out for command, _, out in follow(tmp_path)}
    assert [*printed] == [line for line in commands() if not is_install(line)]
    export, verified = (next(out for line, out in printed.items() if sign in line) for sign in ("export", "verify.py"))
    assert "✓ parity" in export and verified.count("ok ") == 2
    assert {"pybytes.onnx", "pybytes.html", "pybytes.tar", "logits.npz"} <= {
        path.name for path in (tmp_path / "localattn").iterdir()
    }
