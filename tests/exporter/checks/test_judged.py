"""A file is judged as it was written, on inputs as in use: what is ruined behind a special token is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import localattn
from localattn.core.errors import CheckFailed
from localattn.exporter.checks.judged import Judged
from localattn.exporter.lowering.quantize import dynamic_int8
from localattn.exporter.lowering.quantize.linear_layers import linear_layers
from localattn.runtime.parity.overflow import FP16_RANGE

from ...support import tokenizer_folder
from ...support.models.hugging_face import CASES, Case, build
from ...support.tokenizer_folder import USER, VOCABULARY

transformers = pytest.importorskip("transformers")
BY_NAME = {case.name: case for case in CASES}
# The channel of the residual stream that only some tokens have, and the part of the first layer that sees it.
CHANNEL, GAIN, DOWN = 0, 100.0, 2e-5


def massive(case: Case, tokens: Sequence[int], layer: int = 0, gain: float = GAIN, **values: Any) -> Any:
    """Build a model in which some tokens alone have a massive activation, as the first token of trained ones has."""
    model = build(case, vocab_size=VOCABULARY, **values)
    inner = model.model
    with torch.no_grad():
        inner.embed_tokens.weight[:, CHANNEL] = 0
        inner.embed_tokens.weight[list(tokens)] = 0
        inner.embed_tokens.weight[list(tokens), CHANNEL] = 1.0
        for before in inner.layers[: layer + 1]:
            before.self_attn.o_proj.weight[CHANNEL] = 0
        for before in inner.layers[:layer]:
            before.mlp.down_proj.weight[CHANNEL] = 0
        mlp = inner.layers[layer].mlp
        for part in (mlp.gate_proj, mlp.up_proj):
            part.weight[0] = 0
            part.weight[0, CHANNEL] = gain
        mlp.down_proj.weight[:, 0] *= DOWN
    return model


@pytest.fixture(scope="module")
def bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose token 1, the first of each text, is massive; there is no tokenizer."""
    path = tmp_path_factory.mktemp("bos") / "model"
    massive(BY_NAME["mistral"], [1]).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, in which a token of its chat template is massive and nothing else."""
    path = tmp_path_factory.mktemp("chat") / "model"
    massive(BY_NAME["mistral"], [USER], bos_token_id=256, eos_token_id=257).save_pretrained(path)
    tokenizer_folder.write(path)
    return path


def detail(report: Any, name: str) -> str:
    return next(check.detail for check in report.checks if check.name == name)


def test_int8_that_is_ruined_behind_the_first_token_is_refused(bos: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed) as caught:
        localattn.export(bos, tmp_path / "m.onnx", weight_dtype="int8-dynamic")
    assert "of tokens drawn by rank" in caught.value.why and "bos_token_id 1 first" in caught.value.why
    assert not (tmp_path / "m.onnx").exists()


def test_int8_that_keeps_those_values_wide_passes(bos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def others(model: Any) -> list[Any]:
        return [
            node
            for node in linear_layers(model)
            if "layers.0.mlp.down_proj" not in str(node.metadata_props.get("module", ""))
        ]

    monkeypatch.setattr(dynamic_int8, "linear_layers", others)
    report = localattn.export(bos, tmp_path / "m.onnx", weight_dtype="int8-dynamic")
    assert "bos_token_id 1 first" in detail(report, "parity")


@pytest.mark.parametrize("options", [
    {"weight_dtype": "int8", "checks": "quick"},
    *(pytest.param({"weight_dtype": "int8", **more}, marks=pytest.mark.slow) for more in (
        {}, {"standard_ops": True, "opset": 21}, {"mode": "step", "max_length": 128}
    )),
])  # fmt: skip
def test_blocks_multiply_massive_activations_as_they_are(bos: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Rounded to 8 bits, a massive activation takes the bits of the other 31 numbers of its block."""
    report = localattn.export(bos, tmp_path / "m.onnx", **options)
    told = [note for note in report.notes if "inputs are multiplied as they are" in note]
    assert [note.partition(" ")[0] for note in told] == ["model.layers.0.mlp.down_proj"]
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    given = {x.name: x for x in session.get_inputs()}
    if "attention_mask" not in given:  # a step file, whose check has seen it
        return
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (1, 48))
    ids[:, 0] = 1
    (found,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    model = transformers.AutoModelForCausalLM.from_pretrained(bos, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    cosine = (found * wanted).sum() / np.sqrt((found**2.0).sum() * (wanted**2).sum())
    assert cosine > 0.997, cosine  # 0.985 where they are rounded


@pytest.mark.parametrize("massive_one", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_only_a_ruined_layer_is_slower(massive_one: bool, bos: Path, tmp_path: Path) -> None:
    folder = bos if massive_one else tmp_path / "model"
    if not massive_one:
        build(BY_NAME["mistral"], vocab_size=VOCABULARY).save_pretrained(folder)
    report = localattn.export(folder, tmp_path / "m.onnx", weight_dtype="int8", checks="quick")
    levels = {
        next(x.value for x in node.metadata_props if x.key == "module"): attribute.i
        for node in onnx.load(report.path).graph.node
        for attribute in node.attribute
        if attribute.name == "accuracy_level"
    }
    assert len(levels) == 15
    exact = {path for path, level in levels.items() if level != 4}
    assert exact == ({"model.layers.0.mlp.down_proj"} if massive_one else set())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "step"])
def test_int8_that_is_ruined_behind_a_token_of_the_chat_is_refused(chat: Path, tmp_path: Path, mode: str) -> None:
    """Over all rows together the figures are within the tolerance."""
    options: dict[str, Any] = {"mode": "step", "max_length": 128} if mode == "step" else {}
    with pytest.raises(CheckFailed) as caught:
        localattn.export(chat, tmp_path / "m.onnx", weight_dtype="int8-dynamic", **options)
    assert "rows of text" in caught.value.why and "<s> first" in caught.value.why


def test_fp16_that_overflows_is_refused_by_module_and_bf16_is_not(bos: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"overflows in fp16: model\.layers\.0\.mlp reaches") as caught:
        localattn.export(bos, tmp_path / "m.onnx", dtype="fp16")
    assert "65,504" in caught.value.what and "bf16" in caught.value.fix
    localattn.export(bos, tmp_path / "m.onnx", dtype="bf16")  # what the advice says


@pytest.mark.slow
def test_fp16_steps_that_overflow_are_refused(bos: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"model\.layers\.0\.mlp reaches"):
        localattn.export(bos, tmp_path / "m.onnx", dtype="fp16", mode="step", max_length=128)


@pytest.mark.slow
@pytest.mark.parametrize("name, layer, gain, fits", [
    ("mistral", 1, GAIN, True),
    ("mistral", 1, 3 * GAIN, False),
    ("gemma3_text", 0, 3.0, True),
    ("gemma3_text", 1, GAIN, False),
    ("qwen3", 0, 3.0, True),
])  # fmt: skip
def test_the_verdict_is_that_of_the_onnx_reference(
    name: str, layer: int, gain: float, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`onnx.reference` computes fp16 where the file says so, and knows nothing of this package."""
    folder = tmp_path / "model"
    massive(BY_NAME[name], [1], layer, gain).save_pretrained(folder)
    verdict = True
    try:
        report = localattn.export(folder, tmp_path / "judged.onnx", dtype="fp16", standard_ops=True)
        assert "fp16 ends at 65,504" in detail(report, FP16_RANGE)
    except CheckFailed as error:
        assert f"model.layers.{layer}.mlp reaches" in error.what, error.what
        verdict = False
    assert verdict is fits
    monkeypatch.setattr(Judged, "open", classmethod(lambda cls, path, session, *_: cls(session, path, "fp16")))
    localattn.export(folder, tmp_path / "unjudged.onnx", dtype="fp16", standard_ops=True)
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (1, 48))
    ids[:, ::4] = 1  # behind other tokens it is larger than in front of them
    with np.errstate(all="ignore"):
        model = ReferenceEvaluator(onnx.load(tmp_path / "unjudged.onnx"))
        (found,) = model.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    assert bool(np.isfinite(found.astype(float)).all()) is fits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "gemma2"])
@pytest.mark.parametrize("opset", [18, 20])
def test_gelu_of_a_folder_cubes_its_gate_in_fp32(name: str, opset: int, tmp_path: Path) -> None:
    """Its gate reaches 160, whose cube fp16 has not; only the products of the file are in fp16."""
    folder = tmp_path / "model"
    massive(BY_NAME[name], [1], 0, 10.0).save_pretrained(folder)
    report = localattn.export(folder, tmp_path / "m.onnx", dtype="fp16", opset=opset, standard_ops=True)
    text = detail(report, FP16_RANGE)
    assert "the largest of" in text and "infinity" not in text, text
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (1, 12))
    ids[:, 0] = 1
    with np.errstate(over="raise"):
        model = ReferenceEvaluator(onnx.load(tmp_path / "m.onnx"))
        (found,) = model.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    assert np.isfinite(found.astype(float)).all()
    assert localattn.parity(tmp_path / "m.onnx", folder)


@pytest.mark.slow
def test_parity_finds_it_too(bos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judged, "open", classmethod(lambda cls, path, session, *_: cls(session, path, "fp16")))
    file = localattn.export(bos, tmp_path / "m.onnx", dtype="fp16").path
    report = localattn.parity(file, bos)
    assert not report.passed
    assert report.range is not None and report.range.status == "failed"
    assert "model.layers.0.mlp reaches" in report.range.detail


def test_the_report_names_the_inputs(chat: Path, tmp_path: Path) -> None:
    report = localattn.export(chat, tmp_path / "m.onnx")
    text = detail(report, "parity")
    assert "rows of text" in text and "<s> first" in text and "of random tokens" in text
    again = localattn.parity(report.path, chat)
    assert again.passed and "rows of text" in again.judged_on
    half = localattn.export(chat, tmp_path / "b.onnx", dtype="bf16")
    assert "random tokens" not in detail(half, "parity")
