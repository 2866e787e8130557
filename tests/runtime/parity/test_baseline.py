"""The untouched module's own error, which is the baseline of half precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localattn.core.tolerance import Baseline, tolerance_for
from localattn.runtime.parity.baseline import BaselineMeter, UntouchedModule, with_baseline
from localattn.runtime.parity.comparison import Comparison, compare_arrays, merged
from localattn.runtime.parity.runner import Runner
from localattn.runtime.session import Arrays


class Recorded(Runner):
    """A model that always returns the same."""

    name = "recorded"

    def __init__(self, **outputs: NDArray[Any]) -> None:
        self._outputs = outputs

    def run(self, inputs: Arrays) -> Arrays:
        return self._outputs


def test_an_error_measured_in_another_type_is_no_baseline() -> None:
    meter = BaselineMeter(Baseline("bf16", 0.1, 1.0, "a module"), "fp16")
    assert meter.result() is None and "known in bf16, but not in fp16" in meter.why_none
    known = BaselineMeter(Baseline("fp16", 0.1, 1.0, "a module"), "fp16")
    assert known.result() is not None and known.why_none == "" and not known.measures


def test_a_module_that_returns_fewer_outputs_is_measured_on_those() -> None:
    """Of a model for answering questions, it returns where answers begin, and not where they end."""
    start, end = np.random.default_rng(0).standard_normal((2, 3, 9, 4))
    module = UntouchedModule(Recorded(start=start), Recorded(start=start * 1.01), "a module")
    meter = BaselineMeter(module, "fp16")
    meter.take(Recorded(), {}, {"start": start, "end": end})
    found = meter.result()
    assert found is not None and found.relative_rms == pytest.approx(0.01) and meter.measures


def test_positions_of_a_single_score_are_counted_one_by_one() -> None:
    """Where answers begin: `[B, N]`, of which a mask leaves out padding."""

    class Masked(Recorded):
        def counted(self, inputs: Arrays, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
            return inputs["mask"]

    scores = np.random.default_rng(0).standard_normal((2, 9))
    mask = np.arange(9) < np.array([[9], [4]])
    padded = np.where(mask, scores, 100.0)  # whatever upstream computes there
    module = UntouchedModule(Recorded(scores=padded), Recorded(scores=padded * 1.01), "a module")
    meter = BaselineMeter(module, "fp16")
    meter.take(Masked(), {"mask": mask}, {"scores": scores})
    found = meter.result()
    assert found is not None and found.relative_rms == pytest.approx(0.01)


def test_in_fp32_the_module_is_measured_where_the_file_misses_the_table_and_on_all_inputs_then() -> None:
    expected = {"logits": np.random.default_rng(0).standard_normal((1, 9, 4)) * 1e3}
    runner, opened = Recorded(logits=expected["logits"] * (1 + 1e-6)), []

    def module() -> UntouchedModule:
        opened.append(True)
        return UntouchedModule(runner, runner, "a module")

    class Counting(Recorded):
        runs = 0

        def run(self, inputs: Arrays) -> Arrays:
            Counting.runs += 1
            return expected

    meter, reference = BaselineMeter(module, "fp32"), Counting()
    meter.take(reference, {}, expected, missed=False)
    assert not opened and meter.result() is None and meter.why_none == ""
    meter.take(reference, {}, expected, missed=True)
    assert len(opened) == Counting.runs == 1, "the inputs before are run again"
    found = meter.result()
    assert found is not None and found.dtype == "fp32" and found.relative_rms == pytest.approx(1e-6)
    assert np.abs(expected["logits"]).max() * 1e-6 > 1e-4, "beyond the table's absolute part: rounding all the same"


def test_a_module_that_computes_something_else_in_fp32_is_no_measure() -> None:
    expected = np.random.default_rng(0).standard_normal((1, 9, 4))
    runner = Recorded(logits=expected * 1.01)
    meter = BaselineMeter(UntouchedModule(runner, runner, "a module"), "fp32")
    meter.take(Recorded(), {}, {"logits": expected})
    assert meter.result() is None and "differs in fp32 at 100% of positions" in meter.why_none


def _over_sets(errors: Sequence[float]) -> Comparison:
    """Merge comparisons of sets of inputs, each off by one error everywhere, relative to outputs of 1."""
    expected = np.where(np.arange(64) % 2, 1.0, -1.0)
    tolerance = tolerance_for("fp16", 0.0, 0.0)
    parts = [compare_arrays("y", expected * (1 + error), expected, tolerance) for error in errors]
    return merged(parts, tolerance)


@pytest.mark.parametrize(
    ("errors", "passes"),
    [
        ((1.0, 1.8, 0.8, 5.0, 1.0), True),  # much on one set, as rounding does
        ((1.6, 1.6, 1.6, 1.6, 1.6), False),  # a little everywhere, as a fault does
        ((1.0, 1.0, 1.0, 1.0, 20.0), False),  # more on one set than rounding explains
        ((1.9, 1.9, 1.9, 1.0, 1.0), False),  # on most sets
    ],
)
def test_the_median_set_decides_where_few_make_the_error(errors: tuple[float, ...], passes: bool) -> None:
    base, size = _over_sets([1e-3] * 5), 1e-3
    own = _over_sets([size * error for error in errors])
    known = Baseline("fp16", base.relative_rms, base.relative_max * 5, "a module", base.typical_rms)
    tolerance = replace(tolerance_for("fp16"), atol=0.0, rtol=0.0)
    assert own.judge(with_baseline(tolerance, known)) is passes
    old = replace(known, typical_rms=None)  # as a sidecar of an older release has it
    assert own.judge(with_baseline(tolerance, old)) is (own.relative_rms <= 1.5 * base.relative_rms)
