"""The untouched module's own error, which is the baseline of half precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localattn.core.tolerance import Baseline
from localattn.runtime.parity.baseline import BaselineMeter, UntouchedModule
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
