"""A module that computes in fp16 in parts is judged with these rounded, as a checkpoint's file in fp16 is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from localattn.core.errors import CheckFailed
from localattn.exporter.jobs.module import ModuleOptions, export_module
from localattn.runtime.parity.overflow import FP16_RANGE

from ...support.models.opsets import when_run


class Halves(nn.Module):
    """A sum in fp16, whose quotient is small again."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute it."""
        half = (x * self.size).half()
        return ((half + half) / 512).float()


@pytest.mark.parametrize("size, fits", [(8.0, True), (40_000.0, False)])
def test_a_part_of_a_module_that_overflows_in_fp16_is_refused(size: float, fits: bool, tmp_path: Path) -> None:
    inputs = {"x": np.linspace(0.5, 1.5, 128, dtype=np.float32).reshape(1, 16, 8)}
    options = ModuleOptions(rtol=0.01)
    if fits:
        report = export_module(Halves(size), inputs, tmp_path / "m.onnx", options)
        (record,) = (check for check in report.checks if check.name == FP16_RANGE)
        assert record.status == "passed" and "fp16 ends at 65,504" in record.detail
        return
    with pytest.raises(CheckFailed, match="overflows in fp16"):
        export_module(Halves(size), inputs, tmp_path / "m.onnx", options)


class FastGelu(nn.Module):
    """Gelu by tanh between two products, as transformers' `gelu_fast` writes it: in fp16 it squares its gate."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(2))
        with torch.no_grad():
            self.up.weight.copy_(torch.eye(16) * size)
            self.down.weight.copy_(torch.eye(16) / size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute it."""
        gate = self.up(x)
        return self.down(0.5 * gate * (1.0 + torch.tanh(gate * 0.7978845608 * (1.0 + 0.044715 * gate * gate))))


@pytest.mark.parametrize("opset", [when_run(number) for number in (18, 24)])
def test_a_square_that_overflows_inside_of_gelu_is_named_and_passes(opset: int, tmp_path: Path) -> None:
    """The tanh of infinity is 1, as that of the true value is."""
    inputs = {"x": np.linspace(-1, 1, 256, dtype=np.float32).reshape(1, 16, 16)}
    options = ModuleOptions(dtype="fp16", opset=opset)
    report = export_module(FastGelu(3000.0), inputs, tmp_path / "m.onnx", options)
    (record,) = (check for check in report.checks if check.name == FP16_RANGE)
    assert record.status == "passed", record.detail
    assert "reaches" in record.detail and "changes no bit of the outputs" in record.detail, record.detail
