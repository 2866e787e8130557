"""Files in half precision are held against upstream's own error: correct ones pass, degraded ones do not."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from localattn import record
from localattn.core.documents.proof import GOLDEN_CHECK
from localattn.core.documents.sidecar import read_sidecar, sidecar_path
from localattn.core.errors import CheckFailed
from localattn.core.geometry import WindowGeometry
from localattn.core.storage.publishing import SEAL
from localattn.core.tolerance import TOLERANCES, Tolerance, tolerance_for
from localattn.demo import checkpoint_path, config_path
from localattn.exporter.checks.parity import baseline_meter, parity_record
from localattn.exporter.export import ExportRequest, export, open_request
from localattn.exporter.models.family import TORCH_DTYPE
from localattn.exporter.options import ShapeRequest
from localattn.exporter.source.reference_runner import ReferenceRunner
from localattn.exporter.source.source_model import SourceModel
from localattn.exporter.source.untouched_module import UntouchedRunner, untouched_module
from localattn.plugins import torch_op
from localattn.runtime.inputs.arrays import random_inputs
from localattn.runtime.parity.baseline import BaselineMeter, UntouchedModule
from localattn.runtime.parity.compare import compare
from localattn.runtime.parity.runner import Runner
from localattn.runtime.session import Arrays

from ...conftest import TINY, Finished, save_upstream
from ...support.upstream import Case, Pair

pytest.importorskip("local_attention", reason="its own error is what files are held against")

LENGTH = 256  # of the demo: four windows
Attention = Callable[..., Tensor]
ATTENTION = torch_op.windowed_attention


class OurModule(Runner):
    """The module that is exported, run by PyTorch: what its file computes, and what a test breaks in it."""

    name = "the module"

    def __init__(self, source: SourceModel, dtype: str) -> None:
        self.source, self.dtype, self.outputs = source, dtype, [source.outputs[0]]
        self.module = source.module(dtype)

    @torch.no_grad()
    def run(self, inputs: Arrays) -> Arrays:
        given = [torch.from_numpy(x) for x in inputs.values()]
        given = [x.to(TORCH_DTYPE[self.dtype]) if x.is_floating_point() else x for x in given]
        return {self.source.outputs[0]: self.module(*given).float().numpy()}


def one_head_scaled(factor: float) -> Attention:
    def attend(query: Tensor, *rest: Any) -> Tensor:
        query = query.clone()
        query[:, :, 0] *= factor
        return ATTENTION(query, *rest)

    return attend


def window_off_by_one(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any, window: int, *rest: Any
) -> Tensor:
    return ATTENTION(query, key, value, mask, bias, window - 1, *rest)


def values_summed_in_half(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any, window: int, back: int, ahead: int,
    causal: bool, exact: bool, scale: float, *rest: Any,
) -> Tensor:  # fmt: skip
    """Heads first. The weights are exact; the values of a window's keys are added one after the other in half."""
    length = query.shape[2]
    geometry = WindowGeometry(window, back, ahead, causal, exact)
    positions = np.arange(length)
    visible = torch.from_numpy(geometry.visibility(positions, positions, length))
    scores = (query.float() @ key.float().transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    weights, total = scores.softmax(-1).to(value.dtype), torch.zeros_like(value)
    for column in range(length):
        total = total + weights[..., column, None] * value[:, :, column : column + 1]
    return total


class SummedInHalf(nn.Module):
    """A linear layer whose sums are rounded after every term, as onnxruntime's fp16 products on Arm processors are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros((*x.shape[:-1], self.weight.shape[0]))
        for column in range(x.shape[-1]):
            total = total + x[..., column, None] * self.weight[:, column]
        return total if self.bias is None else total + self.bias


def sum_in_half(module: nn.Module) -> None:
    for name, part in list(module.named_children()):
        if isinstance(part, nn.Linear):
            setattr(module, name, SummedInHalf(part))
        else:
            sum_in_half(part)


class Judge:
    """The demo's reference and upstream's own error on inputs of its own, measured once for every candidate."""

    def __init__(self, source: SourceModel, dtype: str, tolerance: Tolerance | None = None) -> None:
        self.source, self.dtype, self.tolerance = source, dtype, tolerance or tolerance_for(dtype)
        self.reference = ReferenceRunner(source, dtype)
        self.meter = baseline_meter(source, dtype, self.tolerance)
        assert self.meter is not None
        self.inputs = [random_inputs(source.inputs(dtype), seed, token_limit=source.token_limit) for seed in (0, 1)]
        self.expected = [self.reference.run(inputs) for inputs in self.inputs]
        for inputs, expected in zip(self.inputs, self.expected, strict=True):
            self.meter.take(self.reference, inputs, expected)

    def status(self, candidate: Runner) -> str:
        found = []
        for inputs, expected in zip(self.inputs, self.expected, strict=True):
            compared = compare(candidate, self.reference, inputs, self.tolerance, expected=expected)
            found += [("", comparison) for comparison in compared.comparisons]
        return str(parity_record(found, self.reference, self.tolerance, "", self.meter).status)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    output = tmp_path_factory.mktemp("demo") / "none.onnx"
    return open_request(ExportRequest(checkpoint_path(), output, config=config_path(), shapes=ShapeRequest(LENGTH)))[1]


@pytest.fixture(scope="module")
def judge(demo: SourceModel) -> Judge:
    return Judge(demo, "fp16")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_shipped_demo_passes_and_shows_both_errors(
    tmp_path: Path, dtype: str, localattn: Callable[..., Finished]
) -> None:
    target = tmp_path / "demo" / "pybytes.onnx"
    done = localattn("demo", "-o", target.parent, "--dtype", dtype, "--rows", 1, "--max-tokens", 0)
    assert done.code == 0, done.err
    shown = " ".join(done.out.split())
    assert f"itself in {dtype} (torch.autocast)" in shown and "times it, at most 1.5" in shown
    sidecar = read_sidecar(target)
    assert sidecar is not None
    parity = next(check for check in sidecar.checks if check.name == "parity")
    assert parity.baseline is not None and parity.baseline.dtype == dtype
    table = TOLERANCES[dtype]
    assert table.atol is not None and float(parity.figures["max_abs"]) > table.atol  # the table alone would refuse it
    assert 0.2 < float(parity.figures["relative_rms"]) / parity.baseline.relative_rms < 1.5


def test_degraded_computations_fail(judge: Judge, demo: SourceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge.status(OurModule(demo, "fp16")) == "passed"
    for fault in (one_head_scaled(1.03), window_off_by_one):
        with monkeypatch.context() as patch:
            patch.setattr(torch_op, "windowed_attention", fault)
            assert judge.status(OurModule(demo, "fp16")) == "failed", fault
    summed = OurModule(demo, "fp16")
    sum_in_half(summed.module)
    assert judge.status(summed) == "failed"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_sums_over_a_windows_keys_in_half_are_told_from_correct_ones(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer alone, by upstream's error only: in the table's absolute part its small outputs would disappear."""
    kwargs = {"window_size": 64, "causal": True, "dim": 32, "exact_windowsize": True}
    source = attention(kwargs, ShapeRequest(LENGTH, 1, heads=2, dim_head=32))
    judge = Judge(source, dtype, replace(tolerance_for(dtype), atol=0.0, rtol=0.0))
    assert judge.status(OurModule(source, dtype)) == "passed"
    monkeypatch.setattr(torch_op, "windowed_attention", values_summed_in_half)
    assert judge.status(OurModule(source, dtype)) == "failed"


def attention(kwargs: dict[str, Any], shapes: ShapeRequest) -> SourceModel:
    from local_attention import LocalAttention

    from ...support.upstream import parse_args

    name = "local_attention.LocalAttention"
    return SourceModel(name, parse_args(name, kwargs), LocalAttention(**kwargs).state_dict(), True, shapes)


def test_upstream_runs_as_it_is(demo: SourceModel) -> None:
    """In fp32 it is the reference; the rotary embedding stays fp32 in half; the random generators are left alone."""
    before = (random.getstate(), torch.random.get_rng_state())
    found = untouched_module(demo, "bf16")
    assert random.getstate() == before[0] and torch.equal(torch.random.get_rng_state(), before[1])
    assert isinstance(found, UntouchedModule) and isinstance(found.rounded, UntouchedRunner)
    inputs = random_inputs(demo.inputs("fp32"), 0, token_limit=demo.token_limit)
    exact, rounded = found.exact.run(inputs)["logits"], found.rounded.run(inputs)["logits"]
    np.testing.assert_allclose(exact, demo.reference(inputs)["logits"], rtol=1e-4, atol=1e-4)
    assert np.abs(rounded - exact).max() > 0.05
    seen: list[torch.dtype] = []
    for part in found.rounded._module.modules():
        if type(part).__name__ == "SinusoidalEmbeddings":
            own = part.forward
            part.forward = lambda x, own=own: seen.append(own(x)[0].dtype) or own(x)  # type: ignore[func-returns-value]
    found.rounded.run(inputs)
    assert seen and set(seen) == {torch.float32}


def measured(source: SourceModel, dtype: str, inputs: Arrays) -> BaselineMeter:
    meter = BaselineMeter(untouched_module(source, dtype), dtype)
    reference = ReferenceRunner(source, dtype)
    meter.take(reference, inputs, reference.run(inputs))
    return meter


def test_a_module_that_computes_something_else_is_no_measure() -> None:
    """Weights of an older hyper-connections, in today's release."""
    kwargs = {**TINY, "dim": 32}
    old = Pair(Case("old streams", "local_attention.LocalTransformer", kwargs, 1, 24, mixes_residuals=False))
    meter = measured(old.source, "fp16", old.inputs)
    assert meter.result() is None and "differs in fp32" in meter.why_none


def test_positions_where_upstream_departs_are_left_out() -> None:
    """Rows whose keys are all masked are upstream's mean and our zeros: no error of rounding."""
    kwargs = {"dim": 16, "window_size": 4, "heads": 2, "dim_head": 8, "causal": True}
    pair = Pair(Case("masked", "local_attention.LocalMHA", kwargs, 2, 24, mask="some"))
    pair.inputs["mask"][:, :2] = False  # the first queries see nothing
    assert not pair.comparable().all()
    baseline = measured(pair.source, "bf16", pair.inputs).result()
    assert baseline is not None and 1e-4 < baseline.relative_rms < 0.02


@pytest.mark.parametrize(
    ("class_name", "why"), [("zeta.LocalMHA", "raises in forward"), ("labml_nn.AFTLocal", "quadratic")]
)
def test_classes_that_are_not_run_say_why(class_name: str, why: str) -> None:
    from localattn.exporter.models.registry import CLASSES

    assert why in CLASSES[class_name].why_not_run


def test_without_upstreams_package_the_table_judges_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo: SourceModel
) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY)
    monkeypatch.setitem(sys.modules, "local_attention", None)
    report = export(ExportRequest(checkpoint, tmp_path / "m.onnx", dtype="fp16", seeds=(0,)))
    parity = next(check for check in report.sidecar.checks if check.name == "parity")
    assert (
        parity.baseline is None and "the table of tolerances only: local-attention cannot be imported" in parity.detail
    )
    strict = ExportRequest(checkpoint, tmp_path / "strict.onnx", dtype="fp16", seeds=(0,), atol=0.0, rtol=0.0)
    with pytest.raises(CheckFailed) as caught:
        export(strict)
    assert "`atol` or `rtol`" in caught.value.fix


def test_parity_measures_it_again_and_the_sidecar_serves_where_torch_is_not(
    tmp_path: Path, localattn: Callable[..., Finished]
) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", {**TINY, "dim": 32})
    half, full = tmp_path / "half.onnx", tmp_path / "full.onnx"
    for path, dtype in ((half, "fp16"), (full, "fp32")):
        export(ExportRequest(checkpoint, path, dtype=dtype, seeds=(0,)))
    again = json.loads(localattn("parity", half, "--against", checkpoint, "--seeds", 1, "--format", "json").out)
    recorded = json.loads(localattn("parity", half, "--against", full, "--seeds", 1, "--format", "json").out)
    first, second = again["tolerance"]["baseline"], recorded["tolerance"]["baseline"]
    assert first["relative_rms"] == pytest.approx(second["relative_rms"], rel=0.1)  # over fewer rows
    assert second["source"] == f"{first['source']}, as the sidecar of half.onnx recorded it"
    assert "at most 1.5" in recorded["against_baseline"][0] and recorded["overall"][0]["passed"]
    page = localattn("parity", half, "--against", full, "--seeds", 1, "--format", "md").out
    assert "Compared with the untouched module" in page and "as the sidecar of half.onnx recorded it" in page
    sidecar = sidecar_path(half)
    written = json.loads(sidecar.read_text())
    for doubtful in (
        {"dtype": "bf16"},
        {"dtype": "fp16", "relative_rms": 5.0},
    ):  # beyond any measured
        for check in written["checks"]:
            if check["baseline"] is not None:
                check["baseline"] |= doubtful
        sidecar.write_text(json.dumps({name: value for name, value in written.items() if name != SEAL}))
        doubted = json.loads(localattn("parity", half, "--against", full, "--seeds", 1, "--format", "json").out)
        assert doubted["tolerance"]["baseline"] is None
        assert any("no sidecar records the untouched module's own error" in line for line in doubted["notes"])
    own = json.loads(localattn("parity", half, "--against", full, "--atol", 1, "--format", "json").out)
    assert own["tolerance"]["baseline"] is None and own["tolerance"]["atol"] == 1


@pytest.mark.parametrize("dtype", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_golden_outputs_are_held_against_the_same_error(tmp_path: Path, dtype: str) -> None:
    """The recorded outputs are of the module in fp32; a wrong window is far beyond what rounding explains."""
    output, shapes = tmp_path / "m.onnx", ShapeRequest(LENGTH)
    request = ExportRequest(checkpoint_path(), output, config=config_path(), shapes=shapes, dtype=dtype)
    module = untouched_module(open_request(request)[1], dtype)
    assert isinstance(module, UntouchedModule)
    golden = tmp_path / "golden.npz"
    record(module.exact._module, {"tokens": torch.randint(0, 97, (1, LENGTH))}, golden)  # type: ignore[attr-defined]
    report = export(replace(request, golden=golden))
    first = report.sidecar.checks[0]
    assert first.name == GOLDEN_CHECK and first.status == "passed"
    assert first.baseline is not None and first.baseline.dtype == dtype
    wrong = json.loads(config_path().read_text())
    wrong["kwargs"]["local_attn_window_size"] //= 2
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    with pytest.raises(CheckFailed, match="does not compute what your model computed"):
        export(replace(request, golden=golden, config=tmp_path / "wrong.json", overwrite=True))
