"""Sound files for the tests of bad input: made once a session, and copied by who damages them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localattn.exporter.export import ExportRequest, export

from ...conftest import TINY, save_upstream
from ...robustness.fuzz.judge import Worker
from ...support.steps import export_steps
from .bundles import once

ONE_LAYER = {**TINY, "depth": 1}
TOKENS = np.zeros((1, 64), np.int64)


@pytest.fixture(scope="session")
def made() -> Path:
    """A folder with a checkpoint, its model, one with external data, and step files."""
    return once("made", _make)


def _make(folder: Path) -> None:
    for path in (folder, folder / "external", folder / "steps"):
        path.mkdir()
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", ONE_LAYER)
    export(ExportRequest(checkpoint, folder / "model.onnx", seeds=(0,)))
    export(ExportRequest(checkpoint, folder / "external/model.onnx", external_data_from=0, seeds=(0,)))
    export_steps(ExportRequest(checkpoint, folder / "steps/step.onnx"), chunk=4)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it to alter."""
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A process that may map 12 GiB and tells how much memory a command took."""
    worker = Worker()
    yield worker
    worker.close()
