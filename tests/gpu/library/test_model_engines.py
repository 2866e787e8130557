"""Whole models whose attention nodes TensorRT-RTX builds as plugins: Hugging Face's with shared heads and layers that
see all keys, local-attention's with xpos, and labml's AFT-local."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from localattn.core.documents.engine_sidecar import read_engine_sidecar

from ...conftest import Finished, save_upstream
from ...support.models.engine_models import SMALL, needs_plugin_tools, needs_rtx
from ...support.models.hugging_face import CASES, build

pytestmark = [needs_plugin_tools, needs_rtx, pytest.mark.slow]

BY_NAME = {case.name: case for case in CASES}


def engine_of(localattn: Callable[..., Finished], model: Path) -> tuple[int, list[str]]:
    """How many attention layers of its engine are plugins, all of them, and which kernels they take."""
    engine = model.with_suffix(".engine")
    options = ("--backend", "tensorrt-rtx", "--target", "rtx40", "--plugin", "library")
    finished = localattn("build", model, "-o", engine, *options)
    assert finished.code == 0, finished.err
    sidecar = read_engine_sidecar(engine)
    checks = {check.name: check for check in sidecar.checks}
    assert checks["plugin in network"].status == "passed"
    assert sidecar.plugin is not None
    kernels = sidecar.plugin.kernels
    return int(checks["plugin in network"].detail.split()[1]), [kernel.model_dump_json() for kernel in kernels]


# Bidirectional Gemma 3 is EmbeddingGemma's encoder.
NAMES = ["modernbert", "mistral", "gemma2", "gemma3_text", "gemma3_text bidirectional", "gpt_oss"]


@pytest.mark.parametrize("name", NAMES)
def test_hugging_face(name: str, localattn: Callable[..., Finished], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers makes the models")
    case = BY_NAME[name]
    build(case).save_pretrained(tmp_path / "folder")
    exported = localattn("export", tmp_path / "folder", "-o", tmp_path / "model.onnx")
    assert exported.code == 0, exported.err
    layers, kernels = engine_of(localattn, tmp_path / "model.onnx")
    assert layers == len(case.windows)
    assert len(kernels) == 1, "one kernel for windows and for all keys"


def test_xpos(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    arguments = {**SMALL, "use_xpos": True, "xpos_scale_base": 8}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", arguments, "model.pt")
    exported = localattn("export", checkpoint, "-o", tmp_path / "model.onnx")
    assert exported.code == 0, exported.err
    layers, kernels = engine_of(localattn, tmp_path / "model.onnx")
    assert layers == 2 and len(kernels) == 1 and '"has_xpos":true' in kernels[0]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_steps_and_chunks(dtype: str, localattn: Callable[..., Finished], tmp_path: Path) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", SMALL, "model.pt")
    output = tmp_path / "model_step.onnx"
    exported = localattn("export", checkpoint, "-o", output, "--mode", "step", "--chunk", "8", "--dtype", dtype)
    assert exported.code == 0, exported.err
    for name, node in (("model_step.onnx", "step"), ("model_step.prefill.onnx", "chunk")):
        layers, kernels = engine_of(localattn, tmp_path / name)
        assert layers == 2 and [f'"node":"{node}"' in kernels[0], '"node":"join"' in kernels[1]] == [True, True]


@pytest.mark.parametrize("mask", [False, True], ids=["causal", "key-mask"])
def test_aft_local(mask: bool, localattn: Callable[..., Finished], tmp_path: Path) -> None:
    length, width, window = 64, 40, 8
    torch.manual_seed(0)
    state = {"pos_bias": torch.randn(length, length)}
    for name in ("query", "key", "value", "output"):
        state |= {f"{name}.weight": torch.randn(width, width) / width**0.5, f"{name}.bias": torch.randn(width)}
    below = torch.ones(length, length, dtype=torch.bool).tril(window - 1)
    checkpoint = tmp_path / "model.pt"
    torch.save(state | {"local_mask": below & below.T}, checkpoint)
    kwargs = {"d_model": width, "seq_len": length, "local_window_size": window}
    (tmp_path / "model.json").write_text(json.dumps({"class": "labml_nn.AFTLocal", "kwargs": kwargs}))
    options = ["--mask"] if mask else ["--causal"]
    exported = localattn("export", checkpoint, "-o", tmp_path / "model.onnx", *options)
    assert exported.code == 0, exported.err
    layers, kernels = engine_of(localattn, tmp_path / "model.onnx")
    assert layers == 1 and len(kernels) == 1 and '"node":"gated_mean"' in kernels[0]
