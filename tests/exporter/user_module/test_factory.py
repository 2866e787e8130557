"""`localattn export --factory`: the user's function, its weights and inputs, and one clear error for each mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import UsageError
from localattn.exporter.user_module.factory import module_from_pickle

from ...conftest import Finished

Command = Callable[..., Finished]
TOKENS = ("--input", "tokens:int64:[1,24]")
NET = """
import torch
from torch import nn
from local_attention import LocalMHA


class Net(nn.Module):
    def __init__(self, dim: int, window: int) -> None:
        super().__init__()
        self.model = nn.Embedding(11, dim)  # a name that is a wrapper's prefix elsewhere
        self.attn = LocalMHA(dim=dim, window_size=window, dim_head=8, heads=2, causal=True)
        self.out = nn.Linear(dim, 11)

    def forward(self, tokens):
        x = self.model(tokens)
        return self.out(x + self.attn(x))


def make(dim=16, window=4):
    return Net(dim, window)


def list_of_nothing():
    return []


def broken():
    raise RuntimeError("no such data set")


number = 3
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a module and its weights."""
    monkeypatch.chdir(tmp_path)
    name = f"net_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(NET)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    module = __import__(name).make()
    torch.save({"state_dict": {f"module.{k}": v for k, v in module.state_dict().items()}}, tmp_path / "w.pt")
    torch.save(module, tmp_path / "whole.pt")
    return tmp_path / f"{name}.py"


def test_factory(net: Path, localattn: Command) -> None:
    done = localattn("export", "--factory", f"{net.stem}:make", "--weights", "w.pt", *TOKENS)
    assert done.code == 0, done
    assert "replaced  attn: local_attention.transformer.LocalMHA, causal exact, window 4" in done.out
    assert "✓ parity" in done.out
    sidecar = read_sidecar(Path("w.onnx"))
    assert sidecar is not None
    assert (sidecar.class_name, sidecar.checkpoint_name, sidecar.seq_len) == (f"{net.stem}:make", "w.pt", 24)
    assert localattn("run", "w.onnx", "--load-inputs", "none.npz").code == 2
    assert localattn("inspect", "w.onnx").code == 0


def test_factory_in_a_file_with_arguments_and_dynamic_axes(net: Path, localattn: Command) -> None:
    arguments = ("--factory", f"{net}:make", "--factory-args", '{"window": 6}', "--dynamic", "batch,seq")
    done = localattn("export", *arguments, *TOKENS, "--seq-len", 30, "--format", "json")
    assert done.code == 0, done
    document = json.loads(done.out)
    assert document["kwargs"] == {"window": 6}
    assert document["dynamic"] == ["batch", "seq"]
    assert document["windows"][0]["window_size"] == 6
    assert "no weights are given" in document["warnings"][0]
    assert Path("make.onnx").exists()


def test_inputs_from_a_file(net: Path, localattn: Command) -> None:
    np.savez("in.npz", tokens=np.arange(20, dtype=np.int64)[None] % 11)
    done = localattn("export", "--factory", f"{net.stem}:make", "--weights", "w.pt", "--load-inputs", "in.npz")
    assert done.code == 0, done
    assert "3 sets of inputs" in done.out


def test_pickled_modules_need_permission(net: Path, localattn: Command) -> None:
    refused = localattn("export", "--factory", f"{net.stem}:make", "--weights", "whole.pt", *TOKENS)
    assert refused.code == 2
    assert "pickled Python object" in refused.err
    for arguments in (("--factory", f"{net.stem}:make", "--weights", "whole.pt"), ("whole.pt",)):
        allowed = localattn("export", *arguments, *TOKENS, "--allow-pickle", "--force")
        assert allowed.code == 0, allowed
        assert "runs any code" in allowed.err
    wrong = localattn("export", "w.pt", *TOKENS, "--allow-pickle", "--force")
    assert wrong.code == 2
    assert "holds a dict" in wrong.err


def test_dry_run_of_a_module(net: Path, localattn: Command) -> None:
    done = localattn("export", "--factory", f"{net.stem}:make", *TOKENS, "--dry-run")
    assert done.code == 0
    assert "replaced  attn" in done.out
    assert not Path("make.onnx").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--factory", "no_such_module_here:make"], "There is no module"),
        (["--factory", "no_such_file.py:make"], "There is no file"),
        (["--factory", "NET"], "names no function"),
        (["--factory", "NET:other"], "has no other"),
        (["--factory", "NET:number"], "is a int"),
        (["--factory", "NET:list_of_nothing"], "returned a list"),
        (["--factory", "NET:broken"], "no such data set"),
        (["--factory", "NET:make", "--factory-args", "{"], "not JSON"),
        (["--factory", "NET:make", "--factory-args", '{"dim": 16, "dim": 32}'], "'dim' is given twice"),
        (["--factory", "NET:make", "--factory-args", "[1]"], "is a list"),
        (["--factory", "NET:make", "--factory-args", '{"width": 3}'], "width"),
        (["--factory", "NET:make", "--factory-args", '{"dim": 24}', "--weights", "w.pt"], "expected [11, 24]"),
        (["--factory", "NET:make", "--weights", "none.pt"], "none.pt"),
        (["--factory", "NET:make", "--weights", "other.pt"], "lacks 3 tensors: attn.to_qkv.weight"),
        (["--factory", "NET:make", *TOKENS, "--input", "x:float32:[1]"], "does not take"),
        (["--factory", "NET:make", "--input", "tokens:float32:[1,24]"], "fails on the example"),
        (["--factory", "NET:make", "--dynamic", "length"], "no input has an axis"),
        (["--factory", "NET:make", "--dynamic", "seq,seq"], "--dynamic"),
        (["--factory", "NET:make", "--seq-len", "1", "--dynamic", "seq"], "2 or more"),
        (["--factory", "NET:make", *TOKENS, "--dtype", "fp16", "--weight-dtype", "int4"], "int4 weights do not"),
        (["--factory", "NET:make", "--mask"], "--input 'mask:bool:[1,N]'"),
        (["--factory", "NET:make", "--input", "token:int64:[1,24]"], "did you mean tokens"),
        (["--factory", "NET:make", "--load-inputs", "in.npz"], "are both given"),
        (["--weights", "w.pt"], "--input"),
        ([], "--input"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_impossible_module_requests(net: Path, localattn: Command, arguments: list[str], words: str) -> None:
    torch.save({"model.weight": torch.zeros(11, 16), "out.weight": torch.zeros(11, 16)}, "other.pt")
    given = [part.replace("NET", net.stem) for part in arguments]
    inputs = () if "--input" in arguments else TOKENS
    finished = localattn("export", *given, *inputs, "-o", "m.onnx")
    assert finished.code == 2, finished
    assert words in finished.err, finished.err
    assert "Traceback" not in finished.err
    assert not Path("m.onnx").exists()
    assert finished.out == ""


def test_a_module_needs_inputs(net: Path, localattn: Command) -> None:
    finished = localattn("export", "--factory", f"{net.stem}:make")
    assert finished.code == 2
    assert "--input" in finished.err


def test_a_model_without_tokens_is_refused_with_advice_that_works(tmp_path: Path, localattn: Command) -> None:
    """It is a module already: what it lacks is an input of tokens."""
    pytest.importorskip("transformers")
    (tmp_path / "mine.py").write_text(MIMI)
    file = tmp_path / "mine.py"
    given = ("-o", tmp_path / "m.onnx", "--checks", "quick")
    refused = localattn("export", "--factory", f"{file}:mimi", "--input", "input_values:float32:[1,1,320]", *given)
    assert refused.code == 2 and "It takes input_values" in refused.err, refused.err
    assert "from a folder" not in refused.err and "A torch.nn.Module of your own" in refused.err
    advised = localattn("export", "--factory", f"{file}:encoder", "--input", "x:float32:[1,32,32]", *given)
    assert advised.code == 0, advised.err


MIMI = """
import torch, transformers

def mimi():
    return transformers.MimiModel(transformers.MimiConfig(
        hidden_size=32, num_filters=4, num_residual_layers=1, upsampling_ratios=[4, 4], codebook_size=64,
        codebook_dim=16, vector_quantization_hidden_dimension=16, num_hidden_layers=1, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, sliding_window=16, upsample_groups=32,
        num_quantizers=4, num_semantic_quantizers=1)).eval()

class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = mimi()
    def forward(self, x):
        return self.model.encoder_transformer(x, return_dict=True).last_hidden_state

def encoder():
    return Encoder().eval()
"""


@pytest.mark.parametrize(
    ("wrap", "entry"),
    [
        (lambda module: module, ""),
        (lambda module: {"model": module, "epoch": 3}, "model"),
        (lambda module: {"checkpoint": {"net": module, "optimizer": None}}, "checkpoint.net"),
        (lambda module: [module, 3], "0"),
    ],
)
def test_a_pickled_module_is_found_in_tables(wrap: Any, entry: str, tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 3)
    torch.save(wrap(module), tmp_path / "m.pt")
    found, origin = module_from_pickle(tmp_path / "m.pt")
    assert torch.equal(found.weight, module.weight)
    assert any(f"'{entry}'" in note for note in origin.notes) == bool(entry)
    torch.save({"first": wrap(module), "second": {"ema": module}}, tmp_path / "m.pt")
    with pytest.raises(UsageError, match="several modules") as caught:
        module_from_pickle(tmp_path / "m.pt")
    named = str(caught.value.fix).split("'")[1]
    assert named == ".".join(filter(None, ["first", entry]))
    assert torch.equal(module_from_pickle(tmp_path / "m.pt", named)[0].weight, module.weight)
