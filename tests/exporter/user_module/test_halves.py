"""A module with weights in fp16 is judged with its numbers rounded, as a checkpoint's file in fp16 is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from localattn.core.errors import CheckFailed
from localattn.exporter.jobs.module import ModuleOptions, export_module
from localattn.runtime.parity.overflow import FP16_RANGE


class Halves(nn.Module):
    """Two layers in fp16, whose product is small; between them is a large number."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(8, 8, bias=False).half() for _ in range(2))
        nn.init.constant_(self.up.weight, size)
        nn.init.constant_(self.down.weight, 1 / 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute both layers."""
        result: torch.Tensor = self.down(self.up(x.to(self.up.weight.dtype)))
        return result.float()


@pytest.mark.parametrize("size, fits", [(8.0, True), (32_768.0, False)])
def test_layers_of_a_module_that_overflow_in_fp16_are_refused(size: float, fits: bool, tmp_path: Path) -> None:
    inputs = {"x": np.linspace(0.5, 1.5, 128, dtype=np.float32).reshape(1, 16, 8)}
    options = ModuleOptions(rtol=0.01)
    if fits:
        report = export_module(Halves(size), inputs, tmp_path / "m.onnx", options)
        (record,) = (check for check in report.checks if check.name == FP16_RANGE)
        assert record.status == "passed" and "fp16 ends at 65,504" in record.detail
        return
    with pytest.raises(CheckFailed, match="overflows in fp16: up reaches"):
        export_module(Halves(size), inputs, tmp_path / "m.onnx", options)
