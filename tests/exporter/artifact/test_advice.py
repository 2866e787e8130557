"""The advice of a failed check is followed, and the export goes through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ...conftest import Finished

HASHED = """
import torch
from torch import nn
from local_attention import LocalMHA


class Hashed(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(16, 16)
        self.att = LocalMHA(dim=16, window_size=4, dim_head=8, heads=2, causal=True)

    def forward(self, tokens):
        return self.att(self.emb(tokens * 2654435761 % 16))


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.att = LocalMHA(dim=16, window_size=4, dim_head=8, heads=2, causal=True)

    def forward(self, x):
        return self.att(x @ x.transpose(1, 2) @ x)


def hashed():
    torch.manual_seed(0)
    return Hashed()


def square():
    torch.manual_seed(0)
    return Square()
"""


@pytest.mark.parametrize(
    ("function", "inputs", "option"),
    [
        ("hashed", "tokens:int64:[1,32]", "--allow-wide-integers"),
        ("square", "x:float32:[1,32,16]", "--allow-quadratic"),
    ],
)
def test_the_option_that_is_named_helps(
    function: str,
    inputs: str,
    option: str,
    tmp_path: Path,
    localattn: Callable[..., Finished],
) -> None:
    path = tmp_path / f"own_{tmp_path.name}.py"
    path.write_text(HASHED)
    command = ("export", "--factory", f"{path}:{function}", "--input", inputs, "-o", tmp_path / "m.onnx")
    refused = localattn(*command)
    assert refused.code == 1 and not (tmp_path / "m.onnx").exists()
    assert option in refused.err
    done = localattn(*command, option)
    assert done.code == 0, done.err
