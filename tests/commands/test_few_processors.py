"""`localattn run` where a container gives it one processor of several: its threads ask for no other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ..support.models.engine_models import small_model


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux pins processes")
def test_threads_on_one_processor() -> None:
    start = "import os; os.sched_setaffinity(0, {max(os.sched_getaffinity(0))}); from localattn.cli import main; main()"
    command = [sys.executable, "-c", start, "run", str(small_model()), "--threads"]
    done = subprocess.run([*command, "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "affinity" not in done.stderr and "ran on cpu" in done.stdout
    refused = subprocess.run([*command, "100000"], capture_output=True, text=True)
    assert refused.returncode == 2 and "100000" in refused.stderr
