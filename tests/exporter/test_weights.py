"""Weights that no file can compute with are said first, by name, and never as an error of 0.0."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from localattn.core.errors import UsageError
from localattn.core.tolerance import Tolerance
from localattn.exporter.checkpoint.open_checkpoint import open_checkpoint
from localattn.exporter.checks.parity import parity_record
from localattn.exporter.jobs.module import export_module
from localattn.exporter.options import ShapeRequest
from localattn.runtime.parity.comparison import compare_arrays
from localattn.runtime.parity.runner import Runner

from ..conftest import Finished

NAME = "layers.1.0.branch.to_out.weight"


def spoil(checkpoint: Path, value: float, name: str = NAME) -> Path:
    state = torch.load(checkpoint)
    state[name][0, 1] = value
    torch.save(state, checkpoint)
    return checkpoint


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
@pytest.mark.parametrize("options", [(), ("--mode", "step"), ("--dtype", "fp16", "--dry-run")])
def test_export_names_weights_that_are_not_finite(tiny: Path, localattn, value, kind, options) -> None:
    result: Finished = localattn("export", spoil(tiny, value), "-o", tiny.with_suffix(".onnx"), *options)
    assert result.code == 2 and not tiny.with_suffix(".onnx").exists()
    assert result.err.startswith(f"Error: Weights are NaN or infinite: {NAME} ({kind}, 1 of 256)")


def test_inspect_says_it_first(tiny: Path, localattn) -> None:
    result: Finished = localattn("inspect", spoil(tiny, float("nan")))
    assert result.code == 0 and NAME in result.out.splitlines()[1]


@pytest.mark.parametrize("value", [65_504.0, 65_519.0])
def test_fp16_holds_what_it_holds(tiny: Path, value: float) -> None:
    open_checkpoint(spoil(tiny, value)).source(ShapeRequest()).module("fp16")


def test_a_weight_that_fp16_does_not_hold_is_named(tiny: Path, localattn) -> None:
    spoil(tiny, -70_000.0)
    result: Finished = localattn("export", tiny, "-o", tiny.with_suffix(".onnx"), "--dtype", "fp16")
    assert result.code == 2 and f"Weights do not fit fp16: {NAME}." in result.err and "7e+04" in result.err
    open_checkpoint(tiny).source(ShapeRequest()).module("bf16")


def test_a_norm_stays_in_fp32_and_may_be_larger(tiny: Path) -> None:
    state = torch.load(tiny)
    state["layers.0.0.branch.norm.weight"][:] = 70_000.0
    torch.save(state, tiny)
    open_checkpoint(tiny).source(ShapeRequest()).module("fp16")


def test_a_users_module_with_nan_is_named(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with torch.no_grad():
        module[1].bias[2] = float("nan")
    with pytest.raises(UsageError, match=r"NaN or infinite: 1\.bias \(NaN, 1 of 4\)"):
        export_module(module, ["input:float32:[2,4]"], tmp_path / "m.onnx")


@pytest.mark.parametrize("whose", ["file", "reference"])
def test_no_error_of_zero_stands_for_nan(whose: str) -> None:
    class Reference(Runner):
        name = "the reference"

        def run(self, inputs):  # type: ignore[no-untyped-def]
            raise AssertionError

    arrays = {"file": np.zeros((2, 3)), "reference": np.zeros((2, 3))}
    arrays[whose][0, 1:] = np.nan
    tolerance = Tolerance(1e-4, 1e-4)
    comparison = compare_arrays("out", arrays["file"], arrays["reference"], tolerance)
    record = parity_record([("seed 0", comparison)], Reference(), tolerance, "1 seed")
    assert record.status == "failed"
    assert record.detail.startswith(f"2 of 6 numbers of the {whose} are NaN or infinite against the reference")
