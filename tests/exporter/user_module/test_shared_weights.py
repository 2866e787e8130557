"""Tensors that a module shares load as safetensors' `load_model` loads them; what is not shared is never tied."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localattn.exporter.checkpoint.load import load_state, with_tied

from ...conftest import TINY, Finished, save_upstream

safetensors_torch = pytest.importorskip("safetensors.torch")
Command = Callable[..., Finished]
TOKENS = ("--input", "tokens:int64:[1,24]", "--checks", "quick")
OWN = """
import torch
from torch import nn
from local_attention import LocalMHA


class Tied(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.emb = nn.Embedding(11, 16)
        self.att = LocalMHA(dim=16, window_size=4, dim_head=8, heads=2, causal=True)
        self.head = nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens):
        x = self.emb(tokens)
        return self.head(x + self.att(x))


def tied():
    torch.manual_seed(1)
    return Tied(True)


def apart():
    torch.manual_seed(1)
    return Tied(False)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the functions, in a folder to work in."""
    monkeypatch.chdir(tmp_path)
    name = f"tied_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return __import__(name)


def test_what_save_model_leaves_out_is_loaded(own: Any, localattn: Command) -> None:
    model = own.tied()
    with torch.no_grad():
        model.emb.weight.mul_(3)
    safetensors_torch.save_model(model, "tied.safetensors")
    safetensors_torch.load_model(own.tied(), "tied.safetensors")  # finds nothing missing
    done = localattn(
        "export", "--factory", f"{own.__name__}:tied", "--weights", "tied.safetensors", "-o", "t.onnx", *TOKENS
    )
    assert done.code == 0, done.err
    assert "tensors that the module shares are in the file once: head.weight is emb.weight" in done.err
    import numpy as np

    from localattn import load

    tokens = np.arange(24).reshape(1, 24) % 11
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(tokens)).numpy()
    assert np.allclose(load("t.onnx").run({"tokens": tokens})["out"], expected, atol=1e-3)


def test_a_file_of_tied_weights_does_not_tie_others(own: Any, localattn: Command) -> None:
    safetensors_torch.save_model(own.tied(), "tied.safetensors")
    done = localattn("export", "--factory", f"{own.__name__}:apart", "--weights", "tied.safetensors", *TOKENS)
    assert done.code == 2
    assert "lacks 1 tensor: head.weight" in done.err
    assert "head.weight was the same tensor as emb.weight" in done.err
    assert "Let the function tie them" in done.err


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_weights_that_differ_are_not_tied_in_silence(kind: str, own: Any, localattn: Command) -> None:
    state = own.apart().state_dict()
    if kind == "pt":
        torch.save(state, "apart.pt")
    else:
        safetensors_torch.save_file(state, "apart.safetensors")
    done = localattn("export", "--factory", f"{own.__name__}:tied", "--weights", f"apart.{kind}", *TOKENS)
    assert done.code == 2
    assert "emb.weight and head.weight are one tensor of the Tied that the function made" in done.err


def test_equal_values_of_shared_tensors_load(own: Any, localattn: Command) -> None:
    torch.save(own.tied().state_dict(), "tied.pt")
    done = localattn("export", "--factory", f"{own.__name__}:tied", "--weights", "tied.pt", "-o", "t.onnx", *TOKENS)
    assert done.code == 0, done.err


def test_a_checkpoint_of_a_known_class(tmp_path: Path, localattn: Command) -> None:
    """A LocalTransformer whose logits share the embedding, as many are trained."""
    from local_attention import LocalTransformer

    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY)
    model = LocalTransformer(**TINY)
    model.to_logits[1].weight = model.token_emb.weight
    saved = checkpoint.with_suffix(".safetensors")
    safetensors_torch.save_model(model, saved)
    loaded = load_state(saved)
    assert loaded.tied == {"to_logits.1.weight": "token_emb.weight"} or loaded.tied == {
        "token_emb.weight": "to_logits.1.weight"
    }
    whole = with_tied(loaded).state
    assert torch.equal(whole["to_logits.1.weight"], whole["token_emb.weight"])
    done = localattn("export", saved, "-o", tmp_path / "t.onnx", "--checks", "quick")
    assert done.code == 0, done.err
    assert "shared tensors are in the file once" in done.err


def test_names_below_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    state = {"model.to_out.weight": torch.ones(2, 2), "model.to_qkv.weight": torch.ones(6, 2)}
    safetensors_torch.save_file(state, path, metadata={"model.norm.weight": "model.to_out.weight", "format": "pt"})
    assert load_state(path).tied == {"norm.weight": "to_out.weight"}


def test_pickled_tables_load_where_it_is_allowed(own: Any, localattn: Command) -> None:
    """The advice of the refusal is followed: a table with objects besides the tensors, and a module inside of one."""
    from types import SimpleNamespace

    torch.save({"model": own.tied().state_dict(), "extra": SimpleNamespace(lr=1)}, "objects.pt")
    torch.save({"model": own.tied(), "epoch": 3}, "inside.pt")
    factory = ("--factory", f"{own.__name__}:tied")
    refused = localattn("export", *factory, "--weights", "objects.pt", *TOKENS)
    assert refused.code == 2 and "Python objects (types.SimpleNamespace)" in refused.err
    assert "--weights objects.pt --allow-pickle" in refused.err
    for name in ("objects.pt", "inside.pt"):
        done = localattn("export", *factory, "--weights", name, "--allow-pickle", "-o", f"{name}.onnx", *TOKENS)
        assert done.code == 0, done.err
    done = localattn("export", "inside.pt", "--allow-pickle", "-o", "inside.onnx", *TOKENS)
    assert done.code == 0, done.err
    assert json.loads(Path("inside.onnx.json").read_text())["class"] == f"{own.__name__}.Tied"
