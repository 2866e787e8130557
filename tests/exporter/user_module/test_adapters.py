"""Modules that PEFT wrapped, or put its layers into, are refused by name; merged ones export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from localattn.core.errors import UsageError
from localattn.exporter.checkpoint.open_checkpoint import open_checkpoint
from localattn.exporter.jobs.module import ModuleOptions, export_module, plan_module
from localattn.exporter.models.adapter_names import OF_ADAPTERS
from localattn.exporter.user_module.adapters import refuse_adapters

from ...support.models.hugging_face import CASES, build

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
BY_NAME = {case.name: case for case in CASES}
KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["Wqkv"], init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=["Wqkv"], use_dora=True, init_lora_weights=False),
    "ia3": lambda: peft.IA3Config(target_modules=["Wqkv", "Wo"], feedforward_modules=["Wo"], init_ia3_weights=False),
    "oft": lambda: peft.OFTConfig(target_modules=["Wqkv"], r=0, oft_block_size=4, init_weights=False),
    "saved modules": lambda: peft.LoraConfig(r=2, target_modules=["Wqkv"], modules_to_save=["decoder"]),
}


def _adapted(kind: str) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(build(BY_NAME["modernbert"]), KINDS[kind]()).eval()


def _inputs() -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(3, 128, (1, 40))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


class Owner(nn.Module):
    """A module of the user's that contains an adapted model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits."""
        logits: torch.Tensor = self.model(input_ids=input_ids).logits
        return logits


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_is_refused_wherever_it_stands(kind: str) -> None:
    model = _adapted(kind)
    for module in (model, model.get_base_model(), Owner(model.get_base_model())):
        with pytest.raises(UsageError, match=r"has an adapter of PEFT(?s:.*)merge_and_unload"):
            refuse_adapters(module)


NEVER: dict[str, Callable[[], Any]] = {
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "P_TUNING": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=8),
    "ADAPTION_PROMPT": lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_layers=1, adapter_len=4),
}


@pytest.mark.parametrize("kind", NEVER)
def test_kinds_that_nothing_merges_are_refused_without_that_advice(kind: str) -> None:
    model = peft.get_peft_model(build(BY_NAME["mistral"]), NEVER[kind]())
    for module in (model, Owner(model)):
        with pytest.raises(UsageError, match="has an adapter of PEFT") as caught:
            refuse_adapters(module)
        assert f"{kind} cannot be merged" in caught.value.fix and "merge_and_unload" not in caught.value.fix


def test_an_adapter_that_transformers_loaded_is_refused(tmp_path: Path) -> None:
    _adapted("lora").save_pretrained(tmp_path)
    model = build(BY_NAME["modernbert"])
    model.load_adapter(str(tmp_path))
    for refuse in (export_module, plan_module):
        with pytest.raises(UsageError, match="has an adapter of PEFT"):
            refuse(model, _inputs(), tmp_path / "model.onnx", ModuleOptions())  # type: ignore[operator]
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.slow
def test_the_advice_works(tmp_path: Path) -> None:
    """A merged model exports live, and from the folder that it is saved to."""
    from localattn.exporter.export import ExportRequest, export

    adapted, inputs = _adapted("lora"), _inputs()
    with torch.no_grad():
        wanted = adapted(**{name: torch.from_numpy(x) for name, x in inputs.items()}).logits.numpy()
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    options = ModuleOptions(dynamic=("batch", "seq"), checks="quick")
    reports = [
        export_module(merged, inputs, tmp_path / "live.onnx", options),
        export(ExportRequest(tmp_path / "merged", tmp_path / "model.onnx", checks="quick")),
    ]
    import onnxruntime

    for report in reports:
        (found,) = onnxruntime.InferenceSession(report.path, providers=["CPUExecutionProvider"]).run(None, inputs)
        assert np.abs(found - wanted).max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_a_model_with_an_adapter_is_refused_with_that_advice(kind: str, tmp_path: Path) -> None:
    model = _adapted(kind)
    for state in (model.state_dict(), model.get_base_model().state_dict()):
        torch.save(state, tmp_path / "weights.pt")
        with pytest.raises(UsageError, match=r"tensors of an adapter(?s:.*)merge_and_unload"):
            open_checkpoint(tmp_path / "weights.pt")


def test_plain_modules_are_not_refused() -> None:
    refuse_adapters(build(BY_NAME["modernbert"]))
    refuse_adapters(nn.Linear(2, 2))


def test_tensors_of_every_kind_of_peft_are_known_by_name() -> None:
    """A checkpoint with them among its weights is told to merge, not that its tensors are unexpected."""
    from peft.config import PromptLearningConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING

    # Of learned prompts PEFT's table has made-up names; their tensors lie in a file of their own.
    prompts = {kind for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items() if issubclass(config, PromptLearningConfig)}
    prefixes = {prefix for kind, prefix in PEFT_TYPE_TO_PREFIX_MAPPING.items() if kind not in prompts}
    assert len(prefixes) > 20
    names = {prefix: f"layers.0.q_proj.{prefix}{'lora_A' if prefix == 'poly_' else 'A'}.default" for prefix in prefixes}
    assert not [prefix for prefix, name in names.items() if not OF_ADAPTERS.search(name)]
