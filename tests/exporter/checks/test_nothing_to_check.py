"""A check that met nothing to check is not proven or skipped, with its reason, and never passed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from localattn.core import closeness
from localattn.core.documents.sidecar import CheckRecord
from localattn.core.errors import CheckFailed
from localattn.core.tolerance import Tolerance, tolerance_for
from localattn.exporter.checks import table
from localattn.exporter.checks.growth import Growth, square_in
from localattn.exporter.checks.layers import check_layer_memory, check_layer_windows
from localattn.exporter.checks.parity import parity_record
from localattn.exporter.checks.wide_integers import check_wide_integers
from localattn.exporter.jobs.module import ModuleOptions, export_module
from localattn.runtime.parity.compare import golden_record
from localattn.runtime.parity.comparison import compare_arrays, unproven_outputs
from localattn.runtime.parity.golden import Golden
from localattn.runtime.parity.runner import Runner

from ...conftest import Finished

Command = Callable[..., Finished]
Array = np.ndarray[Any, np.dtype[np.float64]]
FP32 = tolerance_for("fp32")
FLOAT = onnx.TensorProto.FLOAT


class Dense(nn.Module):
    """Plain attention over all of a sequence, or over every second token of it."""

    def __init__(self, every: int = 1, positions: int = 0) -> None:
        super().__init__()
        self.every, self.table = every, nn.Parameter(torch.randn(positions, 8)) if positions else None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is not None:
            x = x + self.table
        keys = x[:, :: self.every]
        return torch.softmax(keys @ keys.transpose(1, 2), -1) @ keys


class Plain(nn.Module):
    """No attention; linear in the length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0 + 1


def checks_of(module: nn.Module, path: Path, shape: str = "1,12,8", **options: object) -> dict[str, CheckRecord]:
    report = export_module(module.eval(), [f"x:float32:[{shape}]"], path, ModuleOptions(**options))  # type: ignore[arg-type]
    assert bool(report) and report.outcomes["failed"] == 0
    return {check.name: check for check in report.checks} | {"warnings": report.warnings}  # type: ignore[dict-item]


@pytest.mark.parametrize("module", [Dense(), Dense(every=2)], ids=["all", "every second"])
def test_attention_that_nobody_replaced_is_square(module: nn.Module, tmp_path: Path) -> None:
    """No layer tells the length, so growth is measured."""
    with pytest.raises(CheckFailed, match="n × n") as refused:
        checks_of(module, tmp_path / "m.onnx")
    assert "allow_quadratic=True" in refused.value.fix


def test_a_module_of_one_size_is_not_measured(tmp_path: Path) -> None:
    found = checks_of(Dense(positions=12), tmp_path / "m.onnx")["linear memory"]
    assert found.status == "not proven" and "may be n × n" in found.detail and "axis 1 of x" in found.detail


def test_a_module_without_a_window(tmp_path: Path) -> None:
    found = checks_of(Plain(), tmp_path / "m.onnx")
    assert found["linear memory"].status == "passed" and "12 → 6" in found["linear memory"].detail
    assert found["window"].status == "not proven" and "no window to check" in found["window"].detail
    assert any("no attention window was found" in line for line in found["warnings"])  # type: ignore[attr-defined]
    assert found["no wide integers"].status == "skipped"


def test_outputs_that_never_change_prove_nothing(tmp_path: Path) -> None:
    found = checks_of(Constant(), tmp_path / "m.onnx")
    assert found["parity"].status == "not proven" and "expected numbers are 1" in found["parity"].detail


def test_a_tolerance_that_zeros_would_meet(tiny: Path, localattn: Command) -> None:
    model = tiny.with_name("m.onnx")
    ended = localattn("export", tiny, "-o", model, "--checks", "quick", "--atol", 1e30, "--format", "json", "-q")
    document = json.loads(ended.out)
    parity = next(check for check in document["checks"] if check["name"] == "parity")
    assert ended.code == 0 and parity["status"] == "not proven" and "zeros would pass" in parity["detail"]
    assert document["passed"] is True and document["outcomes"]["not proven"] == 1
    again = localattn("parity", model, "--against", tiny, "--atol", 1e30)
    assert (
        again.code == 0 and "? parity" in again.out and "1 not proven" in again.out and "zeros would pass" in again.err
    )


def test_a_file_without_a_window_warns_when_quiet(tmp_path: Path, localattn: Command) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(8, 8)\n")
    model = tmp_path / "m.onnx"
    asked = ("--factory", f"{tmp_path}/net.py:make", "--input", "input:float32:[1,12,8]")
    ended = localattn("export", *asked, "-o", model, "-q")
    assert ended.code == 0 and "no attention window was found" in ended.err and "window: not proven" in ended.err
    shown = localattn("inspect", model)
    assert "no attention window was found" in shown.err and "can forge them" in shown.out
    page = tmp_path / "m.md"
    assert localattn("inspect", model, "-o", page).code == 0
    assert "no attention window was found" in page.read_text() and "1 not proven" in page.read_text()


class Nameless(Runner):
    name = "the reference"

    def run(self, inputs: object) -> dict[str, Array]:
        return {}


def test_no_outputs() -> None:
    record = parity_record([], Nameless(), FP32, "")
    assert record.status == "not proven" and "no outputs" in record.detail
    assert golden_record([], Golden(Path("g.npz"), [{}]), FP32, []).status == "not proven"
    assert unproven_outputs([], FP32) == (True, "the model has no outputs, so nothing was compared")


@pytest.mark.parametrize(
    ("expected", "tolerance", "nothing"),
    [
        (np.linspace(-1, 1, 9), FP32, False),
        (np.linspace(-1, 1, 9) * 1e-6, FP32, False),  # the bound of the whole refuses zeros
        (np.linspace(-1, 1, 9) * 1e-6, Tolerance(1e-4, 1e-4), True),
        (np.linspace(-1, 1, 9), Tolerance(0, 1), True),
        (np.linspace(-1, 1, 9), Tolerance(1, 0), True),
        (np.linspace(-1, 1, 9), Tolerance(1, 0, cosine=0.9), False),
        (np.linspace(-1, 1, 9), Tolerance(1, 0, cosine=-1), True),
        (np.zeros(9), FP32, True),
        (np.full(9, 3.0), FP32, True),
        (np.array([3.0]), FP32, False),
        (np.array([np.nan, np.nan]), FP32, True),
    ],
)
def test_what_a_comparison_proves(
    expected: np.ndarray[tuple[int], np.dtype[np.float64]], tolerance: Tolerance, nothing: bool
) -> None:
    found = compare_arrays("out", expected, expected, tolerance)
    assert bool(found.nothing_proven(tolerance)) is nothing
    if nothing and np.isfinite(expected).all() and expected.any() and tolerance is not FP32:
        assert found.judge(tolerance) and compare_arrays("out", expected * 0, expected, tolerance).passed, "zeros pass"


def test_figures_of_several_sets_are_those_of_all() -> None:
    """An output that is constant in each call, and another in each, is no constant."""
    parts = [closeness.measure(np.full(4, x), np.full(4, x), 1e-4, 1e-4) for x in (1.0, 2.0)]
    assert all(closeness.proves_nothing(part, 1e-4, 1e-4, None) for part in parts)
    whole = compare_arrays("out", np.repeat([1.0, 2.0], 4), np.repeat([1.0, 2.0], 4), FP32)
    assert not whole.nothing_proven(FP32)


def graph(nodes: list[onnx.NodeProto], shapes: dict[str, list[int | str]]) -> onnx.ModelProto:
    values = [onnx.helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in shapes.items()]
    return onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", values[:1], values[-1:], value_info=values[1:-1]))


def attention(n: int, channels: int = 8) -> onnx.ModelProto:
    node = onnx.helper.make_node
    nodes = [node("Transpose", ["x"], ["t"]), node("MatMul", ["x", "t"], ["s"]), node("MatMul", ["s", "x"], ["y"])]
    return graph(nodes, {"x": [n, channels], "t": [channels, n], "s": [n, n], "y": [n, channels]})


@pytest.mark.parametrize(("size", "other"), [(16, 8), (16, 15), (8, 16), (128, 120)])
def test_growth_finds_squares_and_nothing_else(size: int, other: int) -> None:
    assert square_in(Growth("axis 0 of x", size, other, attention(other)), attention(size)) == ["s"]
    # As wide as long, by chance: the products of channels do not grow.
    assert square_in(Growth("axis 0 of x", size, other, attention(other, size)), attention(size, size)) == ["s"]


def test_memory_of_dynamic_axes() -> None:
    model = graph([], {"x": ["time", 8], "s": ["time", "time"], "y": ["time", 8]})
    assert check_layer_memory(model, set(), ["time"], lambda _: None).status == "failed"
    linear = graph([], {"x": ["time", 8], "s": ["Min(4, time)", "time"], "y": ["time", 8]})
    assert check_layer_memory(linear, set(), ["time"], lambda _: None).status == "passed"
    without = graph([], {"x": [4, 8], "s": [4, 8], "y": [4, 8]})
    assert check_layer_memory(without, set(), ["time"], lambda _: None).status == "not proven"
    assert check_layer_memory(without, set(), [], lambda _: None).status == "not proven"
    unknown = graph([], {"x": ["time", 8], "s": ["time", 8], "y": ["time", 8]})
    unknown.graph.value_info[0].type.tensor_type.shape.dim[1].ClearField("dim_value")
    assert check_layer_memory(unknown, set(), ["time"], lambda _: None).status == "not proven"


@pytest.mark.parametrize("size", ["u0", "time + u0", "Max(u0, 4)", "floor(u0/2)", ""])
@pytest.mark.parametrize("axes", [["time"], []])
def test_sizes_that_only_the_run_shows_are_not_proven(size: str, axes: list[str]) -> None:
    """Such as the number of elements that are not 0, which may grow with the square."""
    model = graph([], {"x": ["time", 8] if axes else [16, 8], "found": [3, size], "y": [16, 8]})
    if not size:
        model.graph.value_info[0].type.tensor_type.shape.dim[1].ClearField("dim_param")
    record = check_layer_memory(model, set() if axes else {16}, axes, lambda _: None)
    assert record.status == "not proven" and "not known before the file runs: found" in record.detail


def test_a_tensor_without_any_shape_is_not_proven_and_one_that_can_be_inferred_is_judged() -> None:
    nodes = [onnx.helper.make_node("Transpose", ["x"], ["t"]), onnx.helper.make_node("MatMul", ["x", "t"], ["s"])]
    squares = graph(nodes, {"x": ["time", 8], "y": ["time", 8]})
    record = check_layer_memory(squares, set(), ["time"], lambda _: None)
    assert record.status == "failed" and record.detail.endswith(": s")
    foreign = graph([onnx.helper.make_node("What", ["x"], ["s"], domain="else")], {"x": ["time", 8], "y": ["time", 8]})
    record = check_layer_memory(foreign, set(), ["time"], lambda _: None)
    assert record.status == "not proven" and record.detail.endswith(": s")


@pytest.mark.parametrize(
    ("size", "status"),
    [("time*time", "failed"), ("time**2", "failed"), ("3*time", "passed"), ("time + 2", "passed")],
)
def test_one_dimension_may_hold_the_square(size: str, status: str) -> None:
    model = graph([], {"x": ["time", 8], "flat": [size], "y": ["time", 8]})
    assert check_layer_memory(model, set(), ["time"], lambda _: None).status == status


def test_no_windows_and_no_integers(tmp_path: Path) -> None:
    model = attention(4)
    assert check_layer_windows(model, []).status == "not proven"
    assert check_wide_integers(model, tmp_path, {}).status == "skipped"


def test_every_row_of_the_table_has_a_name_of_its_own_and_a_line_in_the_documents() -> None:
    names = [check.name for check in table.CHECKS]
    assert len(set(names)) == len(names)
    text = (Path(__file__).resolve().parents[3] / "docs/checks.md").read_text(encoding="utf-8")
    assert [name for name in names if f"| {name} |" not in text] == []
    assert {kind for check in table.CHECKS for kind in check.applies_to} == set(table.EVERY)
