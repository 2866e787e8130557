"""`bisect` of a Hugging Face file: it names transformers' own module paths, and the window of the layer at fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ..conftest import Finished
from ..support.models.hugging_face import CASES, build

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "entry", "layer"),
    [
        ("modernbert", "local_attention", "model.layers.1.attn"),
        pytest.param("gpt_oss", "sliding_window", "model.layers.0.self_attn", marks=pytest.mark.slow),
    ],
)
def test_another_window_is_found_in_its_layer(
    name: str, entry: str, layer: str, tmp_path: Path, localattn: Callable[..., Finished]
) -> None:
    build(next(case for case in CASES if case.name == name)).save_pretrained(tmp_path / "model")
    file = tmp_path / "file" / "model.onnx"
    file.parent.mkdir()
    fixed = ("--dynamic", "none", "--seq-len", 60) if name == "gpt_oss" else ()
    given = (*fixed, "--checks", "quick")
    assert localattn("export", tmp_path / "model", "-o", file, *given).code == 0
    same = localattn("bisect", file, "--against", tmp_path / "model")
    assert same.code == 0 and "module boundaries agree" in same.out, same.out
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, entry: 12}))
    found = localattn("bisect", file, "--against", tmp_path / "other")
    assert found.code == 1 and f"first leaves the tolerance in: {layer}\n" in found.out, found.out
    assert "likely cause  window" in found.out
    if name == "modernbert":  # values, the last third of its packed matrix
        (tmp_path / "other" / "config.json").write_text(json.dumps(config))
        weights = load_file(tmp_path / "other" / "model.safetensors")
        weights["model.layers.1.attn.Wqkv.weight"][128:] *= 1.01
        save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
        found = localattn("bisect", file, "--against", tmp_path / "other")
        assert "first leaves the tolerance in: model.layers.1.attn.Wqkv\n" in found.out, found.out
        assert "likely cause  weights" in found.out
