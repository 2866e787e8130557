"""The reference of a checkpoint is the published class with its weights, where it runs; the formula agrees with it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from localattn.core.errors import CheckFailed
from localattn.exporter.checkpoint.open_checkpoint import open_checkpoint
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest
from localattn.exporter.source import source_model, upstream_class
from localattn.exporter.source.source_model import SourceModel
from localattn.exporter.source.upstream_class import upstream_module

from ...conftest import TINY, save_upstream
from ...support.upstream import Pair, draw

CLASSES = ("local_attention.LocalAttention", "local_attention.LocalMHA", "local_attention.LocalTransformer")


@pytest.mark.parametrize("index", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 60))])
@pytest.mark.parametrize("class_name", CLASSES)
def test_the_published_class_and_the_formula_agree(class_name: str, index: int) -> None:
    """Everywhere, rows that a mask takes out included; where the class mixes residuals as the weights want it."""
    case = draw(class_name, index)
    pair = Pair(case)
    own = pair.source
    load = upstream_module(own.class_name, own.args, own.state)
    assert load is not None
    judged = SourceModel(
        own.class_name, own.args, own.state, own.mixes_residuals, _request(own), own.not_in_weights, load
    )
    (formula,), (found,) = own.reference(pair.inputs).values(), judged.reference(pair.inputs).values()
    assert found.dtype == np.float64
    if case.mixes_residuals:
        good = pair.comparable() | ~pair.inputs.get("mask", np.ones((case.batch, case.length), bool))
        difference = np.abs(pair.rows(found) - pair.rows(formula))[good].max(initial=0)
        assert difference < 1e-6 * max(np.abs(formula).max(), 1)


def _request(source: SourceModel) -> ShapeRequest:
    from dataclasses import asdict

    return ShapeRequest(**asdict(source.shapes))


def test_an_export_is_judged_by_the_published_class(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it computed something else, the file would be refused: the formula is not asked."""
    ran = []
    run = upstream_class.run

    def changed(*given: object) -> object:
        ran.append(given)
        return tuple(x * 1.01 for x in run(*given))  # type: ignore[arg-type]

    monkeypatch.setattr(source_model, "run", changed)
    with pytest.raises(CheckFailed, match="parity"):
        export(ExportRequest(tiny, tmp_path / "model.onnx", checks="quick"))
    assert ran


@pytest.mark.parametrize("fault", ["transposed", "scaled", "heads permuted"])
def test_parity_sees_wrong_weights_of_the_exporter(
    fault: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = {
        "transposed": lambda x: x.T.contiguous(),
        "scaled": lambda x: x * 1.01,
        "heads permuted": lambda x: x.reshape(16, 2, 8).flip(1).reshape(16, 16),
    }[fault]
    module = SourceModel.module

    def spoilt(self: SourceModel, *given: object) -> torch.nn.Module:
        made = module(self, *given)  # type: ignore[arg-type]
        name = next(name for name, x in made.named_parameters() if name.endswith("to_out.weight"))
        parameter = made.get_parameter(name)
        parameter.data = change(parameter.data)
        return made

    monkeypatch.setattr(SourceModel, "module", spoilt)
    with pytest.raises(CheckFailed, match="parity"):
        export(ExportRequest(tiny, tmp_path / "model.onnx", checks="quick"))


def test_the_formula_is_the_reference_where_the_package_is_missing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_checkpoint(tiny).source(ShapeRequest()).original is not None
    monkeypatch.setitem(sys.modules, "local_attention", None)
    source = open_checkpoint(tiny).source(ShapeRequest())
    assert source.original is None
    tokens = np.arange(source.shapes.seq_len, dtype=np.int64)[None] % 23
    assert np.isfinite(source.reference({"tokens": tokens})["logits"]).all()


def test_the_formula_is_the_reference_of_weights_that_mix_no_residuals(tmp_path: Path) -> None:
    import json

    path = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY)
    config = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**config, "hyper_connections": "0.3.9"}))
    assert open_checkpoint(path).source(ShapeRequest()).original is None
