"""Golden outputs beside another reference: each is judged by its own tolerance, and nothing hides behind the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from localattn import parity
from localattn.core.documents.sidecar import CheckRecord
from localattn.core.geometry import WindowGeometry
from localattn.core.tolerance import Baseline, Tolerance, tolerance_for
from localattn.runtime.parity.compare import worst_of
from localattn.runtime.parity.comparison import Comparison, compare_arrays
from localattn.runtime.parity.golden import Golden
from localattn.runtime.parity.report import ParityReport

from ...conftest import Finished

Command = Callable[..., Finished]
INT8 = tolerance_for("int8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of `y = x·w` without sidecars, in two precisions, with golden outputs that were recorded in both."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2, 9, 16)).astype(np.float32)
    w = generator.standard_normal((16, 5)).astype(np.float32)
    for name, dtype, kind in (("m", np.float32, TensorProto.FLOAT), ("half", np.float16, TensorProto.FLOAT16)):
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            "product",
            [helper.make_tensor_value_info("x", kind, x.shape)],
            [helper.make_tensor_value_info("y", kind, (2, 9, 5))],
            [numpy_helper.from_array(w.astype(dtype), "w")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, tmp_path / f"{name}.onnx")
        onnx.save(model, tmp_path / f"{name}-copy.onnx")
    np.savez(tmp_path / "golden.npz", x=x, y=x @ w)
    np.savez(tmp_path / "golden16.npz", x=x.astype(np.float16), y=(x @ w).astype(np.float16))
    return tmp_path


def test_outputs_recorded_in_half_are_judged_in_half(folder: Path) -> None:
    golden = folder / "golden16.npz"
    alone = parity(folder / "m.onnx", golden=golden)
    assert alone.passed and alone.dtype == "fp16" and alone.tolerance.atol == 1e-2
    beside = parity(folder / "m.onnx", folder / "m-copy.onnx", golden=golden)
    assert [check.status for check in beside.checks] == ["passed", "passed"] and beside.passed
    assert beside.dtype == "fp32" and beside.tolerance.atol == 1e-4, "the two files are compared as before"
    assert all(row["passed"] for row in beside.rows()) and beside.rows()[0]["max_abs"] > 1e-3
    assert beside.overall()["y"].max_abs == 0


def test_golden_outputs_are_saved_as_the_reference(folder: Path) -> None:
    recorded = dict(np.load(folder / "golden.npz"))
    recorded["y"][1, 2, 3] += 1
    np.savez(folder / "off.npz", **recorded)
    for against in (None, folder / "m-copy.onnx"):
        saved = {"save_inputs": folder / "in.npz", "save_outputs": folder / "out.npz", "overwrite": True}
        assert not parity(folder / "m.onnx", against, golden=folder / "off.npz", **saved).passed
        outputs = np.load(folder / "out.npz")
        np.testing.assert_array_equal(outputs["y.reference"], recorded["y"])
        assert outputs["y.reference"][1, 2, 3] - outputs["y"][1, 2, 3] == pytest.approx(1, abs=1e-4)


def test_the_untouched_modules_error_counts_for_golden_outputs_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = dict(np.load(folder / "golden.npz"))
    recorded["y"] += 0.1
    np.savez(folder / "off.npz", **recorded)
    assert not parity(folder / "half.onnx", golden=folder / "off.npz").passed
    known = Baseline("fp16", 0.1, 1.0, "a module")
    monkeypatch.setattr("localattn.runtime.parity.files._recorded_baseline", lambda *_: known)
    report = parity(folder / "half.onnx", golden=folder / "off.npz")
    assert report.checks[0].status == "passed" and report.passed
    assert all(row["passed"] for row in report.rows()) and "a module" in report.against_baseline()[0]


def test_inputs_may_be_called_as_the_golden_file(
    folder: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "other").mkdir()
    np.savez(folder / "other/golden.npz", x=np.ones((2, 9, 16), np.float32))
    monkeypatch.chdir(folder / "other")
    report = parity(folder / "m.onnx", folder / "m-copy.onnx", golden=folder / "golden.npz", inputs="golden.npz")
    assert [name for name, _ in report.comparisons] == ["golden.npz", "golden.npz"]
    assert [check.name for check in report.checks] == ["golden outputs", "parity"] and report.passed


def compared(error: float, count: int = 1000, tolerance: Tolerance = INT8) -> Comparison:
    expected = np.random.default_rng(count).standard_normal((1, count, 4))
    return compare_arrays("y", expected * (1 + error), expected, tolerance)


def test_exact_golden_outputs_do_not_hide_a_difference_from_the_reference() -> None:
    """Figures over all elements are means: many right ones beside few wrong ones would pass together."""
    good, bad = compared(0.0, 1000), compared(0.3, 10)
    record = CheckRecord(name="golden outputs", status="passed")
    report = ParityReport("int8", "cpu", Path("m.onnx"), Path("r.onnx"), INT8, [])
    assert not report.passed, "nothing was compared"
    report.golden, report.golden_count, report.golden_tolerance = record, 1, INT8
    report.take("golden.npz", {}, {}, [good])
    assert report.passed and report.checks == [record]
    report.take("seed 0", {}, {}, [bad])
    assert not report.passed and report.checks[1].status == "failed"
    assert [row["passed"] for row in report.rows()] == [True, False]


def test_a_result_with_nan_is_the_worst() -> None:
    tolerance = tolerance_for("fp32")
    expected = np.ones((1, 8, 4))
    spoilt = expected.copy()
    spoilt[0, 3, 1] = np.nan
    far, nan = (compare_arrays("y", x, expected, tolerance) for x in (expected + 1, spoilt))
    assert far.excess(tolerance) > nan.excess(tolerance)
    assert worst_of([("far", far), ("nan", nan)], tolerance)[0] == "nan"
    reference = compare_arrays("y", expected, spoilt, tolerance)
    assert worst_of([("far", far), ("reference", reference)], tolerance)[0] == "reference"
    assert reference.figures()["expected_not_finite"] == 1 and "expected_not_finite" not in nan.figures()
    report = ParityReport("fp32", "cpu", Path("m.onnx"), Path("r.onnx"), tolerance, [])
    report.take("far", {"x": np.zeros(1)}, {}, [far])
    report.take("nan", {"x": np.ones(1)}, {}, [nan])
    report.take("far again", {"x": np.zeros(1)}, {}, [far])
    assert report.inputs["x"] == [1], "the inputs that are saved are those with NaN"
    assert ", 1 NaN or Inf against" in report.checks[0].detail


@pytest.mark.parametrize(
    ("inputs", "length"),
    [({"x": np.zeros((1, 9, 16))}, 9), ({"tokens": np.zeros((2, 9), np.int64), "scale": np.zeros((2, 99))}, 9)],
    ids=["vectors", "tokens"],
)
def test_a_window_shows_in_longer_sequences_also_of_a_classifier(inputs: dict[str, NDArray[Any]], length: int) -> None:
    golden = Golden(Path("golden.npz"), [{**inputs, "classes": np.zeros((2, 3))}])
    seen, hidden = WindowGeometry(length // 2, causal=True), WindowGeometry(length, causal=True)
    everything = WindowGeometry.all_keys(causal=False)
    assert golden.too_short([]) == "" and golden.too_short([seen, everything]) == ""
    assert golden.too_short([seen, hidden]).startswith(f"sequences of {length} tokens are too short to show")
