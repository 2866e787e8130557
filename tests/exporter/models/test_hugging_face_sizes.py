"""Hugging Face models of the sizes that people deploy, with random weights, and windows of their lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from localattn.core.errors import CheckFailed
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.models.hugging_face.arguments import HuggingFaceArgs, words
from localattn.exporter.models.hugging_face.quirks import Quirks

from ...support.models.hugging_face import CASES, Case, build, initialised

pytest.importorskip("transformers")
# Weights as transformers draws them. In 18 layers of saturated attention, which the weights of the tiny models give,
# PyTorch's own fp32 is off by 4e-3 of float64.
_GEMMA = {"vocab_size": 262144, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512}
SIZES = [
    Case(
        "ModernBERT-base",
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {
            **{"vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22},
            **{"num_attention_heads": 12, "num_key_value_heads": None, "head_dim": None},
            **{"max_position_embeddings": 8192, "local_attention": 128, "cls_token_id": 1, "sep_token_id": 2},
        },
        ("all keys", "±64", "±64"),
    ),
    Case(
        "EmbeddingGemma-300m",
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {
            **_GEMMA,
            **{"hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 24, "num_attention_heads": 3},
            **{"max_position_embeddings": 2048, "use_bidirectional_attention": True},
        },
        ("±256", "all keys"),
    ),
    Case(
        "Gemma-3-270m",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            **{"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4},
            **{"max_position_embeddings": 32768},
        },
        ("511 back", "all keys before"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SIZES, ids=lambda case: case.name)
def test_a_model_of_real_size_passes_every_check(case: Case, tmp_path: Path) -> None:
    model = initialised(case)
    longest, vocabulary = model.config.max_position_embeddings, model.config.vocab_size
    model.save_pretrained(tmp_path / "model")
    del model
    output = tmp_path / "model.onnx"
    report = export(ExportRequest(tmp_path / "model", output))
    assert {check.status for check in report.checks} == {"passed"}
    args = HuggingFaceArgs(**report.sidecar.kwargs)
    assert {words(layer) for layer in args.layers} == set(case.windows)
    session = onnxruntime.InferenceSession(output, providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(3, vocabulary, (1, min(longest, 1500)))
    found = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
    assert found.shape[:2] == ids.shape and np.isfinite(found).all()
    assert torch.from_numpy(found).std() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("window", [512, 1024])
@pytest.mark.parametrize("name", ["gemma3_text", "gemma3_text bidirectional"])
def test_long_windows_are_compared_beyond_their_edges(
    name: str, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal around the window and around two of it; a file that sees one key less is found."""
    case = next(case for case in CASES if case.name == name)
    model = build(case, sliding_window=window, max_position_embeddings=8 * window)
    model.save_pretrained(tmp_path / "model")
    report = export(ExportRequest(tmp_path / "model", tmp_path / "model.onnx"))
    assert {check.status for check in report.checks} == {"passed"}
    assert next(check for check in report.checks if check.name == "parity").figures["trials"] > 12
    read = Quirks.read_layers

    def narrower(*given: Any) -> Any:
        layers, run = read(*given)
        return [layer.model_copy(update={"back": layer.back - 1}) if layer.back else layer for layer in layers], run

    monkeypatch.setattr(Quirks, "read_layers", narrower)
    with pytest.raises(CheckFailed, match="parity"):
        export(ExportRequest(tmp_path / "model", tmp_path / "narrow.onnx", checks="quick"))
