"""Logits as large as those of trained models: a file may err as PyTorch does in fp32, and a fault still fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import localattn
from localattn.core.errors import CheckFailed
from localattn.exporter.export import ExportRequest, open_request
from localattn.exporter.models.family import ShapeRequest
from localattn.exporter.models.hugging_face import family, reference
from localattn.exporter.source.reference_runner import ReferenceRunner
from localattn.exporter.source.source_model import SourceModel

from ...support.models.hugging_face import CASES, WINDOW, build

pytest.importorskip("transformers")
CASE = next(case for case in CASES if case.name == "gemma3_text")
# Logits have a root mean square of some thousands.
LOUD = 1000.0


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 whose fp32 logits are further from float64 than the table's absolute part in PyTorch too."""
    path = tmp_path_factory.mktemp("loud") / "model"
    model = build(CASE)
    with torch.no_grad():
        model.lm_head.weight.mul_(LOUD)
    model.save_pretrained(path)
    return path


def parity_of(path: Path, output: Path, **options: Any) -> Any:
    report = localattn.export(path, output, **{"checks": "quick", **options})
    return next(check for check in report.sidecar.checks if check.name == "parity")


def test_a_file_may_err_as_the_untouched_model_does(loud: Path, tmp_path: Path) -> None:
    record = parity_of(loud, tmp_path / "m.onnx")
    assert record.figures["max_abs"] > 1e-4, "the table alone would refuse it"
    assert record.baseline is not None and record.baseline.dtype == "fp32"
    assert record.detail.startswith(
        "rounding error of the file and of transformers.Gemma3ForCausalLM itself in fp32 (PyTorch), "
    )
    assert "times it, at most 1.5" in record.detail


def every(model: Any, ending: str) -> list[Any]:
    return [part for path, part in model.named_modules() if path.endswith(ending)]


def window_off_by_one(model: Any) -> None:
    part = next(x for x in every(model, "self_attn") if not x.localattn_window.sees_all)
    part.localattn_window = type(part.localattn_window).reaching(part.localattn_window.backward_reach - 1, 0)


def heads_swapped(model: Any) -> None:
    weight, width = every(model, "q_proj")[1].weight, model.config.head_dim
    weight.copy_(torch.cat((weight[width : 2 * width], weight[:width], weight[2 * width :])))


def scale_missing(model: Any) -> None:
    every(model, "self_attn")[0].scaling = 1.0


def rotary_base_wrong(model: Any) -> None:
    rotary = every(model, "rotary_emb")[0]
    for name, x in rotary.named_buffers():
        if name.endswith("inv_freq"):
            x.mul_(1.01 ** -torch.linspace(0, 1, len(x)))


def norm_without_one(model: Any) -> None:
    every(model, "pre_feedforward_layernorm")[0].weight.sub_(1.0)


FAULTS = (window_off_by_one, heads_swapped, scale_missing, rotary_base_wrong, norm_without_one)


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        *((fault, {}) for fault in FAULTS),
        *(
            pytest.param(fault, options, marks=pytest.mark.slow)
            for fault in FAULTS
            for options in ({"dtype": "fp16"}, {"dtype": "bf16"}, {"mode": "step", "seq_len": 64})
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else " ".join(map(str, value.values())) or "fp32",
)
def test_a_real_fault_fails_all_the_same(
    fault: Callable[[Any], None], options: dict[str, Any], loud: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = family.load

    def load(model: Any, state: Any) -> None:
        own(model, {name: x.clone() for name, x in state.items()})
        with torch.no_grad():
            fault(model)

    monkeypatch.setattr(family, "load", load)
    with pytest.raises(CheckFailed, match="parity"):
        parity_of(loud, tmp_path / "m.onnx", **options)


def test_logits_of_a_large_vocabulary_are_compared_around_every_window(
    loud: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_MOST_LOGITS", 40 * 128)
    seen: list[np.ndarray] = []
    own = reference.head_positions

    def watched(spec: Any) -> Any:
        found = own(spec)
        seen.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(family, "head_positions", watched)
    record = parity_of(loud, tmp_path / "m.onnx")
    assert record.status == "passed" and seen
    for positions in seen:
        assert len(positions) <= 40 and {0, 1, WINDOW - 1, WINDOW, WINDOW + 1} <= set(positions.tolist())


def test_padding_does_not_count_at_the_positions_either(loud: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MOST_LOGITS", 40 * 128)
    request = ExportRequest(loud, Path("unwritten.onnx"), shapes=ShapeRequest(seq_len=90))
    runner = ReferenceRunner(open_request(request)[1])
    ids = np.random.default_rng(0).integers(0, 128, (1, 90))
    mask = (np.arange(90) >= 50).astype(np.int64)[None]
    positions = next(iter(runner.sample({"input_ids": ids, "attention_mask": mask}).values()))
    kept = runner.counted({"input_ids": ids, "attention_mask": mask}, (1, int(positions.sum()), 128))
    assert kept is not None
    np.testing.assert_array_equal(kept, np.arange(90)[positions][None] >= 50)


def test_weights_are_free_once_the_file_is_written(loud: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[set[str]] = []
    own = SourceModel.forget_weights

    def forget(self: SourceModel) -> None:
        before = self.work
        own(self)
        freed.append({x.device.type for x in self.state.values()})
        assert self.work == before

    monkeypatch.setattr(SourceModel, "forget_weights", forget)
    parity_of(loud, tmp_path / "m.onnx")
    assert freed == [{"meta"}]
