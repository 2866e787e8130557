"""Mutated files of every kind meet a clear error or work: no traceback, hang, crash, or half-written output.

A small sample; `python -m tests.fuzz --count N` runs campaigns, LOCALATTN_FUZZ=N tries more here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .fuzz.judge import Worker, meet
from .fuzz.seeds import Seeds
from .fuzz.targets import TARGETS

FUZZ = settings(
    max_examples=int(os.environ.get("LOCALATTN_FUZZ", "20")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    return Seeds(tmp_path_factory.mktemp("seeds"))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.weight])
@FUZZ
@given(number=st.integers(0, 1 << 30))
def test_mutated(name: str, number: int, seeds: Seeds, worker: Worker) -> None:
    """`python -m tests.fuzz --replay NAME:NUMBER` shows the case again."""
    with tempfile.TemporaryDirectory(prefix="localattn-case-") as folder:
        _, fault = meet(worker, TARGETS[name].make(Random(f"{name}:{number}"), seeds), Path(folder))
    assert fault is None, f"{name}:{number}: {fault}"


def test_sound_files_work(seeds: Seeds, worker: Worker) -> None:
    """Else the mutations would be refused for another reason."""
    for name, target in TARGETS.items():
        if target.start is None or target.with_bytes is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            assert meet(worker, target.with_bytes(target.start(seeds), seeds), Path(folder)) == (0, None), name
