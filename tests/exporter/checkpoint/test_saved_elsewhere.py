"""Checkpoints as they come from other machines and wrappers: other devices, several wrappers, Python objects."""

from __future__ import annotations

import zipfile
from collections import defaultdict
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localattn.core.errors import UsageError
from localattn.exporter.checkpoint.load import load_state

torch = pytest.importorskip("torch")

STATE = {"to_qkv.weight": torch.arange(24.0).reshape(6, 4), "to_out.weight": torch.ones(4, 2)}


def retagged(path: Path, device: str) -> None:
    """Write the device of every tensor anew: a text in the pickle, "cpu" where this machine wrote it."""
    with zipfile.ZipFile(path) as source:
        members = {name: source.read(name) for name in source.namelist()}
    text = device.encode()
    (pickled,) = (name for name in members if name.endswith("data.pkl"))
    changed = members[pickled].replace(b"X\x03\0\0\0cpu", b"X" + len(text).to_bytes(4, "little") + text)
    assert changed != members[pickled]
    with zipfile.ZipFile(path, "w") as target:
        for name, content in (members | {pickled: changed}).items():
            target.writestr(name, content)


@pytest.mark.parametrize("device", ["mps", "cuda:3", "xla:0", "hpu", "privateuseone:0", "xpu:1", "npu:0"])
def test_tensors_of_any_device(device: str, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(STATE, path)
    retagged(path, device)
    loaded = load_state(path).state
    assert all(torch.equal(loaded[name], STATE[name]) for name in STATE)
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}


WRAPPERS = {
    "DDP of compiled": "module._orig_mod.",
    "compiled DDP": "_orig_mod.module.",
    "Lightning of DDP of compiled": "model.module._orig_mod.",
    "FSDP of compiled": "_fsdp_wrapped_module._orig_mod.",
    "Lightning of FSDP": "model._fsdp_wrapped_module.",
    "network of Lightning": "network.model.",
}


@pytest.mark.parametrize("inside", ["", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module._orig_mod."])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_in_any_order(wrapper: str, inside: str, tmp_path: Path) -> None:
    """Around the model, and around a part of it."""
    named = {WRAPPERS[wrapper] + name.replace("weight", f"{inside}weight"): x for name, x in STATE.items()}
    torch.save({"state_dict": named}, tmp_path / "w.pt")
    loaded = load_state(tmp_path / "w.pt")
    assert not loaded.warnings and list(loaded.state) == list(STATE)
    assert all(torch.equal(loaded.state[name], STATE[name]) for name in STATE)


def test_an_average_of_weights_behind_a_wrapper(tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    state = {name.replace("module.", "module.to_out."): x for name, x in averaged.state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    assert sorted(load_state(tmp_path / "w.pt").state) == ["to_out.bias", "to_out.weight"]


OBJECTS: dict[str, tuple[Any, str]] = {
    "a path": (PurePosixPath("runs/1"), "PurePosixPath"),
    "a namespace": (SimpleNamespace(lr=1), "SimpleNamespace"),
    "a number of numpy": (np.float64(0.5), "numpy"),
    "a table with defaults": (defaultdict(list, a=[1]), "defaultdict"),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_other_objects_are_named_with_what_to_do(case: str, tmp_path: Path) -> None:
    held, name = OBJECTS[case]
    torch.save({"model": STATE, "extra": held}, tmp_path / "w.pt")
    with pytest.raises(UsageError, match=f"contains Python objects .*{name}") as caught:
        load_state(tmp_path / "w.pt")
    assert caught.value.fix is not None
    assert "torch.save(model.state_dict(), 'weights.pt')" in caught.value.fix and "--allow-pickle" in caught.value.fix
