"""Models that nobody here wrote: two published packages, exported, checked, and run at dynamic lengths.

The factories are those of `examples/packages`, whose `table.py` does the same for all packages of docs/packages.md.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from localattn.core.documents.sidecar import Sidecar
from localattn.exporter.jobs.module import ModuleOptions, export_module
from localattn.runtime import load

WHY = "not installed; it is in the extra `dev`"
# Factory, package to import, upstream layers in it, window.
MODELS = [
    ("performer", "performer_pytorch", 2, 32),
    ("performer_masked", "performer_pytorch", 2, 32),
    ("colt5", "colt5_attention", 1, 32),
]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / "packages" / "table.py"
    spec = importlib.util.spec_from_file_location("localattn_package_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def inputs_of(table: ModuleType, factory: str) -> tuple[str, ...]:
    return next(model.inputs for model in table.MODELS if model.factory == factory)


def statuses(sidecar: Sidecar) -> dict[str, str]:
    return {record.name: record.status for record in sidecar.checks}


@pytest.mark.parametrize(("factory", "package", "layers", "window"), MODELS)
def test_a_published_model_exports_and_passes_every_check(
    table: ModuleType, tmp_path: Path, factory: str, package: str, layers: int, window: int
) -> None:
    pytest.importorskip(package, reason=WHY)
    module = getattr(table.load_factories(), factory)()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    report = export_module(module, inputs_of(table, factory), tmp_path / "model.onnx")
    assert set(statuses(report.sidecar).values()) == {"passed"}
    assert [record.replaced for record in report.sidecar.layers] == [True] * layers
    assert {record.window_size for record in report.sidecar.windows} == {window}
    assert len(report.sidecar.windows) == layers
    after = module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_a_performer_with_an_open_length_pads_by_itself(table: ModuleType, tmp_path: Path) -> None:
    """Also where PyTorch's own exporter gives a file that fails: it traces upstream's padding once."""
    pytest.importorskip("performer_pytorch", reason=WHY)
    module = table.load_factories().performer()
    options = ModuleOptions(dynamic=("seq",))
    report = export_module(module, inputs_of(table, "performer"), tmp_path / "model.onnx", options)
    assert set(statuses(report.sidecar).values()) == {"passed"}
    session = load(tmp_path / "model.onnx")
    for length in (1, 31, 32, 33, 100, 127):
        tokens: np.ndarray[Any, Any] = np.random.default_rng(length).integers(0, 64, (1, length))
        with torch.no_grad():
            expected = module(torch.from_numpy(tokens)).numpy()
        (got,) = session.run({"x": tokens}).values()
        np.testing.assert_allclose(got, expected, atol=1e-5)
