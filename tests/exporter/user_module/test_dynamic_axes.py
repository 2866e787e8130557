"""A dynamic axis that the module does not have is refused before anything is traced, with the form that names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from localattn.core.errors import UsageError
from localattn.exporter.options import ModuleOptions
from localattn.exporter.user_module.opened_module import OpenedModule


class Waves(nn.Module):
    """Two channels in, any batch and length."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 5, padding=2)

    def forward(self, wave: Tensor) -> Tensor:
        return self.conv(wave)


class Fixed(nn.Module):
    """One batch and one length."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(2, 12))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 2:
            raise ValueError("the batch is 2\nand nothing else")
        return x + self.bias


class Blocks(nn.Module):
    """Whole blocks of three tokens, up to twelve."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 12:
            raise ValueError("no more than 12")
        return x.unflatten(1, (-1, 3)).sum(2)


def opened(module: nn.Module, given: str, *dynamic: str) -> OpenedModule:
    return OpenedModule(module, [given], ModuleOptions(dynamic=dynamic))


def test_other_axes_are_refused_with_the_right_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="the module takes no other size than 2 on axis 1 of wave") as caught:
        opened(Waves(), "wave:float32:[1,2,400]", "batch", "seq")
    assert "With 3 there: RuntimeError" in caught.value.why and "none has a name" in caught.value.why
    found = re.fullmatch(r'Name the axes: --input "(.+)"\.', caught.value.fix)
    assert found is not None and found[1] == "wave:float32:[batch=1,2,seq=400]"
    assert opened(Waves(), found[1], "batch", "seq").sizes == {"batch": 2, "seq": 400}


def test_an_axis_the_user_named_is_not_named_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no other size than 2 on axis 0 of x") as caught:
        opened(Fixed(), "x:float32:[rows=2,12]", "rows")
    assert caught.value.why == "With 3 there: ValueError: the batch is 2"
    assert caught.value.fix == "Leave rows out of `dynamic`."


def test_a_module_without_such_an_axis_is_told_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no other size than 2") as caught:
        opened(Fixed(), "x:float32:[2,12]", "batch")
    assert 'for instance --input "x:float32:[batch=2,seq=12]", or leave batch out' in caught.value.fix
    with pytest.raises(UsageError, match="no input has an axis of that name") as caught:
        opened(Fixed(), "x:float32:[2,12]", "heads")
    assert "[batch=2,seq=128,64]" in caught.value.fix


@pytest.mark.parametrize("length", [6, 9, 12])
def test_an_axis_that_takes_some_sizes_is_one(tmp_path, monkeypatch, length):
    monkeypatch.chdir(tmp_path)
    assert opened(Blocks(), f"x:float32:[batch=2,seq={length}]", "seq").sizes["seq"] == length


def test_the_command_line_says_it(tmp_path, monkeypatch, localattn):
    monkeypatch.chdir(tmp_path)
    Path("waves.py").write_text("import torch\n\n\ndef make():\n    return torch.nn.Conv1d(2, 3, 5)\n")
    given = ("export", "--factory", "waves.py:make", "--input", "input:float32:[1,2,400]", "--dynamic", "batch,seq")
    finished = localattn(*given)
    assert finished.code == 2 and 'Name the axes: --input "input:float32:[batch=1,2,seq=400]".' in finished.err
