"""The input `position_ids` of Hugging Face files: positions of every row are the caller's, with padding on any side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from localattn import export_module
from localattn.core.errors import UsageError
from localattn.core.tensors import POSITION_IDS
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.models.parts.float64 import InFloat64
from localattn.exporter.options import ShapeRequest
from localattn.runtime.inputs.arrays import random_inputs

from ...conftest import Finished
from ...support.models.hugging_face import CASES, build

pytest.importorskip("transformers")
BY_NAME = {case.name: case for case in CASES}


def test_rows_padded_on_the_left_have_the_positions_that_they_are_given(tmp_path: Path) -> None:
    """Against the untouched model in float64, called as transformers' own generation calls it, and with gaps."""
    model = build(BY_NAME["gemma3_text"])
    ids = np.random.default_rng(0).integers(3, 128, (3, 70))
    mask = (np.arange(70) >= np.array([[0], [23], [61]])).astype(np.int64)
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    inputs = {"input_ids": ids, "attention_mask": mask, POSITION_IDS: positions}
    path = tmp_path / "model.onnx"
    report = export_module(model, inputs, path, dynamic=("batch", "seq"), checks="quick")
    assert [x.name for x in report.sidecar.inputs] == list(inputs)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    gaps = positions + (np.arange(70) > 40) * 30
    found = [session.run(None, {**inputs, POSITION_IDS: x})[0] for x in (positions, gaps)]
    exact = build(BY_NAME["gemma3_text"]).double()
    for given, logits in zip((positions, gaps), found, strict=True):
        with torch.no_grad(), InFloat64():
            tensors = {name: torch.from_numpy(x) for name, x in {**inputs, POSITION_IDS: given}.items()}
            wanted = exact(**tensors, use_cache=False).logits.numpy()
        assert np.abs(logits - wanted)[mask != 0].max() < 5e-5
    assert np.abs(found[0] - found[1])[:, 45:].max() > 0.01  # over the gap; both rows see across it


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "modernbert", "phi3", "gpt_oss"])
def test_files_with_positions_pass_every_check(name: str, tmp_path: Path, localattn: Callable[..., Finished]) -> None:
    build(BY_NAME[name]).save_pretrained(tmp_path / "model")
    output = tmp_path / "model.onnx"
    done = localattn("export", tmp_path / "model", "--position-ids", "-o", output)
    assert done.code == 0, done.err
    done = localattn("parity", output, "--against", tmp_path / "model", "--seq-len", "60")
    assert done.code == 0, done.err


@pytest.mark.slow
@pytest.mark.parametrize("positions", [False, True])
def test_both_sets_of_frequencies_of_longrope_are_compared(positions: bool, tmp_path: Path) -> None:
    """The file changes from one to the other with the largest position, within the lengths of the sweep."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [float(n) for n in range(2, 10)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    model = build(BY_NAME["phi3"], rope_parameters=rope, original_max_position_embeddings=32)
    model.save_pretrained(tmp_path / "model")
    shapes = ShapeRequest(position_ids=positions)
    report = export(ExportRequest(tmp_path / "model", tmp_path / "model.onnx", shapes=shapes))
    assert {check.status for check in report.checks} == {"passed"}


def test_positions_are_refused_where_they_are_no_input(tmp_path: Path, localattn: Callable[..., Finished]) -> None:
    shapes = ShapeRequest(position_ids=True)
    build(BY_NAME["llama4_text"]).save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match="begin again for packed sequences"):
        export(ExportRequest(tmp_path / "model", tmp_path / "model.onnx", shapes=shapes))
    done = localattn("export", tmp_path / "model", "--position-ids", "--mode", "step", "-o", tmp_path / "step.onnx")
    assert done.code == 2 and "--position-ids" in done.err and "step file counts" in done.err
    done = localattn("export", tmp_path / "model", "--mode", "step", "-o", tmp_path / "step.onnx")
    assert done.code == 2 and "begin anew at fixed positions" in done.err
    torch.save({"rel_pos.inv_freq": torch.ones(4)}, tmp_path / "layer.pt")
    given = ("--seq-len", 32, "--heads", 2, "--dim-head", 8, "--position-ids", "-o", tmp_path / "layer.onnx")
    (tmp_path / "layer.json").write_text('{"class": "local_attention.LocalAttention", "kwargs": {"window_size": 8}}')
    done = localattn("export", tmp_path / "layer.pt", *given)
    assert done.code == 2 and "counts positions itself" in done.err, done.err


def test_random_positions_count_the_tokens() -> None:
    from localattn.core.tensors import TensorSpec

    drawn = random_inputs([TensorSpec(POSITION_IDS, "int64", (2, 5))], 0)
    assert drawn[POSITION_IDS].tolist() == [[0, 1, 2, 3, 4]] * 2
