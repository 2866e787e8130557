"""Trained models, small but with outliers and a massive first token: correct files pass, real faults do not.

Each fault is in what the exporter builds; the reference reads the folder itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import localattn
from localattn.core.errors import CheckFailed
from localattn.exporter.checks import rounded
from localattn.exporter.lowering.quantize import blocked
from localattn.exporter.models.hugging_face import family

from ...support.trained.train import HERE

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
Fault = Callable[[Any], None]
STEPS = {"mode": "step", "max_length": 96}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"dtype": "fp16"},
    "bf16": {"dtype": "bf16"},
    "int8": {"weight_dtype": "int8"},
    "int4": {"weight_dtype": "int4"},
    "int8 steps": {"weight_dtype": "int8", **STEPS},
    "int4 steps": {"weight_dtype": "int4", **STEPS},
}
# The check that finds a fault in a file of rounded weights, whatever they are rounded to.
PROOF = "graph before rounding"


def every(model: Any, ending: str) -> list[Any]:
    return [part for path, part in model.named_modules() if path.endswith(ending)]


def window_off_by_one(model: Any) -> None:
    part = next(x for x in every(model, "self_attn") if not x.localattn_window.sees_all)
    part.localattn_window = type(part.localattn_window).reaching(part.localattn_window.backward_reach - 1, 0)


def heads_swapped(model: Any) -> None:
    part = every(model, "self_attn")[1]
    width = part.head_dim
    for name in ("weight", "bias"):
        values = getattr(part.q_proj, name)
        if values is not None:
            values.copy_(torch.cat((values[width : 2 * width], values[:width], values[2 * width :])))


def scale_missing(model: Any) -> None:
    every(model, "self_attn")[0].scaling = 1.0


def rotary_base_wrong(model: Any) -> None:
    for name, values in every(model, "rotary_emb")[0].named_buffers():
        if name.endswith("inv_freq"):
            values.mul_(1.01 ** -torch.linspace(0, 1, len(values)))


def bias_dropped(model: Any) -> None:
    every(model, "k_proj")[0].bias.zero_()
    every(model, "v_proj")[0].bias.zero_()


def norm_without_one(model: Any) -> None:
    every(model, "pre_feedforward_layernorm")[0].weight.sub_(1.0)


def epsilon_wrong(model: Any) -> None:
    part = every(model, "input_layernorm")[1]
    name = "eps" if hasattr(part, "eps") else "variance_epsilon"
    assert getattr(part, name) == 1e-6
    setattr(part, name, 1e-5)


COMMON: tuple[Fault, ...] = (window_off_by_one, heads_swapped, scale_missing, rotary_base_wrong, epsilon_wrong)
FAULTS: dict[str, tuple[Fault, ...]] = {"gemma3": (*COMMON, norm_without_one), "qwen2": (*COMMON, bias_dropped)}
# Of the second model, the precisions of faults that both models have.
FEW = ("fp16", "int4")
DEFAULT = (("gemma3", window_off_by_one, "int4"), ("qwen2", epsilon_wrong, "bf16"))


def grid() -> list[Any]:
    cases = []
    for name, faults in FAULTS.items():
        for fault in faults:
            for precision in PRECISIONS:
                default = (name, fault, precision) in DEFAULT
                if name == "qwen2" and fault is not bias_dropped and precision not in FEW and not default:
                    continue
                marks = [] if default else [pytest.mark.slow]
                title = f"{name} {fault.__name__} {precision}"
                cases.append(pytest.param(name, fault, precision, marks=marks, id=title))
    return cases


def spoil(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the exporter build a model with a fault."""
    own = family.load

    def load(model: Any, state: Any) -> None:
        own(model, {name: x.clone() for name, x in state.items()})
        with torch.no_grad():
            fault(model)

    monkeypatch.setattr(family, "load", load)


@pytest.mark.parametrize(("name", "fault", "precision"), grid())
def test_a_real_fault_is_refused(
    name: str, fault: Fault, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(fault, monkeypatch)
    with pytest.raises(CheckFailed) as caught:
        localattn.export(HERE / name, tmp_path / "m.onnx", checks="quick", **PRECISIONS[precision])
    text = str(caught.value)
    if fault is epsilon_wrong:
        assert "model constants" in text and "input_layernorm adds 1e-05 before it divides, and the model 1e-06" in text
    elif "model constants" in text:  # bf16 errs by more than this fault
        assert fault is rotary_base_wrong and "inv_freq is off by 0.0" in text
    else:
        assert f"failed its check: {PROOF if precision.startswith('int') else 'parity'}" in text, text
        assert "cosine at least 0.9" not in text, text  # no quality is to blame
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[] if (name, precision) == ("qwen2", "int4") else pytest.mark.slow)
        for name in FAULTS
        for precision in PRECISIONS
    ],
)
def test_a_correct_file_passes_and_says_what_rounding_costs(name: str, precision: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"checks": "quick"} if precision == "int4" else {}
    report = localattn.export(HERE / name, tmp_path / "m.onnx", **options, **PRECISIONS[precision])
    checks = {check.name: check for check in report.checks}
    assert checks["parity"].status == checks["model constants"].status == "passed"
    if precision.startswith("int"):
        proof, stored = checks[PROOF], checks["rounded weights"]
        assert proof.status == stored.status == "passed"
        assert proof.figures["max_abs"] < 1e-3
        assert float(stored.figures["exact"]) < 1e-5 < float(stored.figures["activations"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("options", [{}, STEPS], ids=["whole", "steps"])
def test_a_refusal_says_what_would_pass_and_it_does(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A massive `<bos>` ruins int8 with a scale for all tokens; blocks of 8 bits are not."""
    with pytest.raises(CheckFailed, match="parity") as caught:
        localattn.export(HERE / name, tmp_path / "m.onnx", checks="quick", weight_dtype="int8-dynamic", **options)
    assert "With `weight_dtype='int8'` it would pass, measured on these inputs." in caught.value.fix
    localattn.export(HERE / name, tmp_path / "m.onnx", checks="quick", weight_dtype="int8", **options)


@pytest.mark.slow
def test_a_ruined_file_is_refused_as_quality_and_the_advice_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of four levels: the file computes what its weights say, and the model is ruined."""
    own = blocked.round_in_blocks

    def coarse(matrix: Any, *given: Any) -> Any:
        found = own(matrix, *given)
        return replace(found, levels=found.levels // 64 * 64 + 32)

    monkeypatch.setattr(blocked, "round_in_blocks", coarse)
    with pytest.raises(CheckFailed, match=r"are off by .* of their norm, in 8 bits at most 0\.06") as caught:
        localattn.export(HERE / "gemma3", tmp_path / "m.onnx", checks="quick", weight_dtype="int8")
    assert "rounded weights" in caught.value.what
    monkeypatch.setattr(rounded, "_FURTHEST", {8: 1e9})
    with pytest.raises(CheckFailed, match="parity") as caught:
        localattn.export(HERE / "gemma3", tmp_path / "m.onnx", checks="quick", weight_dtype="int8")
    assert "cosine at least 0.9)" in caught.value.why
    assert "Without `weight_dtype` it would pass: its graph before rounding did." in caught.value.fix
    localattn.export(HERE / "gemma3", tmp_path / "m.onnx", checks="quick")
