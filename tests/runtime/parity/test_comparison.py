"""Comparison figures against plain numpy, and the frontier against the criterion itself."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localattn.core import closeness
from localattn.core.errors import CheckFailed, UsageError
from localattn.core.tolerance import TOLERANCES, Baseline, Tolerance, tolerance_for
from localattn.runtime.parity.comparison import compare_arrays, merged

FP32 = tolerance_for("fp32")


def pair(seed=0, shape=(3, 50, 7), noise=1e-3):
    generator = np.random.default_rng(seed)
    expected = generator.standard_normal(shape).astype(np.float32)
    return expected + (noise * generator.standard_normal(shape)).astype(np.float32), expected


@pytest.mark.parametrize("chunk", [64, 1 << 18])
def test_figures_are_those_of_numpy(monkeypatch, chunk):
    monkeypatch.setattr(closeness, "_CHUNK", chunk)
    actual, expected = pair()
    got = compare_arrays("out", actual, expected, FP32)
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    d = np.abs(a - e)
    assert got.max_abs == d.max()
    assert got.max_rel == pytest.approx((d / np.abs(e)).max(), rel=1e-12)
    assert got.rms == pytest.approx(math.sqrt((d**2).mean()), rel=1e-12)
    assert got.relative_rms == pytest.approx(math.sqrt((d**2).mean() / (e**2).mean()), rel=1e-12)
    assert got.cosine == pytest.approx((a * e).sum() / math.sqrt((a * a).sum() * (e * e).sum()), rel=1e-12)
    assert got.worst_index == np.unravel_index((d - 1e-4 * np.abs(e)).argmax(), d.shape)
    assert got.count == d.size
    assert not got.passed


def test_the_difference_is_taken_in_float64():
    # In float16 the two round to the same number.
    actual, expected = np.float64([1.0 + 2e-4]), np.float16([1.0])
    assert compare_arrays("out", actual, expected, Tolerance(1e-4, 0)).max_abs == pytest.approx(2e-4)
    assert not compare_arrays("out", actual, expected, Tolerance(1e-4, 0)).passed


@pytest.mark.parametrize(("error", "passes"), [(0.99, True), (1.01, False)])
@pytest.mark.parametrize("expected", [0.0, 3.0, -3.0, 1000.0])
def test_the_criterion_at_its_edge(error, passes, expected):
    tolerance = Tolerance(1e-3, 1e-2)
    actual = np.array([expected + error * (1e-3 + 1e-2 * abs(expected)), 1.0])
    assert compare_arrays("out", actual, np.array([expected, 1.0]), tolerance).passed is passes


parts = st.lists(st.tuples(st.integers(-40, 40), st.integers(0, 40)), min_size=1, max_size=60)


@settings(max_examples=100)
@given(parts, st.integers(1, 20))
def test_figures_judge_every_tolerance_like_the_arrays(pairs, chunk):
    """Sixteenths, so that the criterion is exact: the smallest atol that passes, and the one below."""
    expected = np.array([e for e, _ in pairs]) / 16
    actual = expected + np.array([d for _, d in pairs]) / 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closeness, "_CHUNK", chunk)
        made = compare_arrays("out", actual, expected, FP32)
    for rtol in np.arange(0, 2, 1 / 16):
        needed = max(0.0, float((np.abs(actual - expected) - rtol * np.abs(expected)).max()))
        assert made.judge(Tolerance(needed, rtol))
        if needed:
            assert not made.judge(Tolerance(needed - 1 / 256, rtol))


def test_the_frontier_stays_small():
    generator = np.random.default_rng(1)
    expected = generator.standard_normal(1_000_000)
    # Errors that grow with the value are the worst case: every element is near the frontier.
    made = compare_arrays("out", expected * (1 + 1e-3 * generator.random(expected.size)), expected, FP32)
    assert 1 <= len(made.frontier) < 300


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("both", [False, True])
def test_nan_and_inf_always_fail(poison, both):
    actual, expected = pair(noise=0)
    actual[1, 20, 3] = poison
    if both:
        expected[1, 20, 3] = poison
    got = compare_arrays("out", actual, expected, Tolerance(1e9, 1e9))
    assert got.not_finite == 1 and got.worst_index == (1, 20, 3)
    assert got.expected_not_finite == both
    assert not got.passed and not got.judge(Tolerance(1e300, 0))
    assert got.max_abs == 0  # the figures are those of the rest


def test_a_reference_that_is_not_finite_proves_nothing():
    actual, expected = pair(noise=0)
    expected[0, 0, 0] = np.nan
    assert not compare_arrays("out", actual, expected, FP32).passed


def test_all_nan_fails_without_a_crash():
    got = compare_arrays("out", np.full(3, np.nan), np.zeros(3), FP32)
    assert not got.passed and got.not_finite == 3
    json.dumps(got.figures(), allow_nan=False)


def test_the_cosine_floor_catches_small_outputs_that_are_all_wrong():
    expected = np.full(100, 5e-3)
    fp16 = tolerance_for("fp16")
    got = compare_arrays("out", -expected, expected, fp16)
    assert got.judge(Tolerance(fp16.atol, fp16.rtol)) and not got.passed
    assert got.cosine == pytest.approx(-1)


def test_cosine_of_null_vectors():
    zero, one = np.zeros(4), np.ones(4)
    assert compare_arrays("out", zero, zero, FP32).cosine == 1
    assert compare_arrays("out", one, zero, FP32).cosine == 0
    assert compare_arrays("out", one, zero, FP32).figures()["relative_rms"] == "inf"


def test_rows_that_do_not_count_are_left_out():
    actual, expected = pair(noise=0)
    actual[0, 10:] = np.nan
    actual[2, 49, 6] += 5
    rows = np.ones(actual.shape[:2], bool)
    rows[0, 10:] = False
    rows[2, 49] = False
    got = compare_arrays("out", actual, expected, FP32, rows=rows)
    assert got.passed and got.count == rows.sum() * 7
    rows[2, 49] = True
    got = compare_arrays("out", actual, expected, FP32, rows=rows)
    assert not got.passed and got.worst_index == (2, 49, 6)


@pytest.mark.parametrize(
    ("actual", "expected", "rows"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), None),
        (np.zeros(6), np.zeros((2, 3)), None),
        (np.zeros((0, 3)), np.zeros((0, 3)), None),
        (np.zeros((2, 3)), np.zeros((2, 3)), np.zeros(2, bool)),
        (np.zeros((2, 3)), np.zeros((2, 3)), np.ones(3, bool)),
        (np.zeros((2, 3)), np.zeros((2, 3)), np.ones(2)),
    ],
)
def test_what_cannot_be_compared_does_not_pass(actual, expected, rows):
    with pytest.raises(CheckFailed, match="out"):
        compare_arrays("out", actual, expected, FP32, rows=rows)


def test_a_scalar_output_compares():
    assert compare_arrays("loss", np.float32(1), np.float32(1), FP32).passed


def test_the_tolerance_table_is_the_documented_one():
    table = {name: (t.atol, t.rtol, t.cosine) for name, t in TOLERANCES.items()}
    assert table == {
        "fp32": (1e-4, 1e-4, None), "fp16": (1e-2, 1e-2, 0.999), "bf16": (5e-2, 2e-2, 0.999),
        "int8": (None, None, 0.99), "int8-dynamic": (None, None, 0.99), "int8-qdq": (None, None, 0.99),
        "fp8": (None, None, 0.99), "int4": (None, None, 0.985),
    }  # fmt: skip
    figures = {name: (t.relative_rms, t.divergence, t.agreement) for name, t in TOLERANCES.items()}
    eight_bits = dict.fromkeys(("int8", "int8-dynamic", "int8-qdq", "fp8"), (0.14, 0.1, 0.7))
    full = {"fp32": (1e-2, None, None), "fp16": (0.1, None, None), "bf16": (0.1, None, None)}
    assert figures == full | eight_bits | {"int4": (0.17, 0.15, 0.6)}


def test_outputs_below_the_absolute_tolerance_do_not_pass_unseen():
    """Probabilities of a large vocabulary, for example: single elements say nothing about them."""
    expected = 1e-5 * np.random.default_rng(0).standard_normal((4, 100))
    assert not compare_arrays("out", 1.5 * expected, expected, FP32).passed
    assert not compare_arrays("out", np.zeros_like(expected), expected, FP32).passed
    assert compare_arrays("out", expected.astype(np.float32), expected, FP32).passed
    small = 500 * expected  # the components of normalised embeddings, for example
    for dtype in ("fp16", "bf16"):
        assert not compare_arrays("out", 1.5 * small, small, tolerance_for(dtype)).passed, "of a wrong scale"
        assert compare_arrays("out", small.astype(np.float16), small, tolerance_for(dtype)).passed
    own = tolerance_for("fp32", atol=1e-4)  # what the user sets stands alone
    assert compare_arrays("out", np.zeros_like(expected), expected, own).passed


def test_a_tolerance_of_the_users_judges_single_elements_alone():
    assert tolerance_for("fp16", atol=0.5) == Tolerance(0.5, 1e-2, 0.999)
    assert tolerance_for("fp16", rtol=0.0) == Tolerance(1e-2, 0.0, 0.999)
    assert tolerance_for("int8", atol=0.5) == Tolerance(0.5, 0.0, 0.99)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_tolerance_is_a_finite_number(wrong):
    with pytest.raises(UsageError):
        tolerance_for("fp32", atol=wrong)
    with pytest.raises(UsageError):
        tolerance_for("fp32", rtol=wrong)


def test_an_unknown_element_type_names_the_known():
    with pytest.raises(UsageError, match="fp32, fp16, bf16, int8, int8-dynamic, int8-qdq, fp8, int4"):
        tolerance_for("int2")


def test_comparisons_of_several_inputs_are_one():
    """Merged figures are those of the arrays end to end, for every tolerance too."""
    pairs = [pair(seed, (2, 10 + seed, 7)) for seed in range(3)]
    whole = merged([compare_arrays("out", a, e, FP32) for a, e in pairs], FP32)
    joined = compare_arrays("out", *(np.concatenate([p[side] for p in pairs], axis=1) for side in (0, 1)), FP32)
    for name in ("count", "max_abs", "max_rel", "rms", "relative_rms", "relative_max", "cosine"):
        assert getattr(whole, name) == pytest.approx(getattr(joined, name), rel=1e-12), name
    for rtol in (0.0, 1e-3, 1e-1):
        assert whole.excess(Tolerance(0.0, rtol)) == joined.excess(Tolerance(0.0, rtol))
    poisoned = pairs[1][0].copy()
    poisoned[0, 0, 0] = np.nan
    parts = [compare_arrays("out", a, e, FP32) for a, e in (pairs[0], (poisoned, pairs[1][1]))]
    assert not merged(parts, Tolerance(1e9, 0.0)).passed and merged(parts, FP32).worst_index == (0, 0, 0)


def test_the_baseline_admits_what_the_table_refuses():
    actual, expected = pair(noise=1e-2)
    got = compare_arrays("out", actual, expected, Tolerance(1e-3, 0.0))
    assert not got.passed
    for rms, largest, passes in ((1.01, 1.01, True), (0.99, 1.01, False), (1.01, 0.99, False)):
        known = Baseline("fp16", rms * got.relative_rms / 1.5, largest * got.relative_max / 4, "a module")
        tolerance = Tolerance(1e-3, 0.0, takes_baseline=True, baseline=known)
        assert got.judge(tolerance) is passes
        again = Tolerance.from_dict(json.loads(json.dumps(asdict(tolerance))))
        assert again == tolerance and "1.5 times the untouched module's own error in fp16" in again.describe()
    actual[0, 0, 0] = np.nan
    assert not compare_arrays("out", actual, expected, tolerance).passed


def logits(noise, seed=0, shape=(2, 300, 40)):
    generator = np.random.default_rng(seed)
    expected = 3 * generator.standard_normal(shape)
    return expected + noise * generator.standard_normal(shape), expected


def test_figures_of_logits_are_pytorchs():
    torch = pytest.importorskip("torch")
    actual, expected = logits(0.5)
    found = compare_arrays("logits", actual, expected, tolerance_for("int8")).distribution
    q, p = (torch.from_numpy(x).log_softmax(-1) for x in (actual, expected))
    divergence = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True) / 600
    assert found.divergence == pytest.approx(float(divergence), rel=1e-10)
    assert found.agreement == (actual.argmax(-1) == expected.argmax(-1)).mean() and found.positions == 600
    assert compare_arrays("out", actual, expected, tolerance_for("int8")).distribution is None
    assert compare_arrays("logits", actual, expected, FP32).distribution is None


def test_rounded_weights_are_judged_by_what_they_do_to_the_next_token():
    """Each figure refuses what the others let through."""
    int8 = tolerance_for("int8")
    actual, expected = logits(0.2)
    assert compare_arrays("logits", actual, expected, int8).passed
    assert np.abs(actual - expected).max() > 0.7  # single elements do not judge
    assert not compare_arrays("logits", *logits(0.7), int8).passed
    swapped = expected.copy()  # the two largest logits change places where they are close
    order = expected.argsort(-1)
    first, second = order[..., -1:], order[..., -2:-1]
    for place, other in ((first, second), (second, first)):
        np.put_along_axis(swapped, place, np.take_along_axis(expected, other, -1), -1)
    lenient = replace(int8, divergence=1e9, cosine=None, relative_rms=None)
    got = compare_arrays("logits", swapped, expected, lenient)
    assert got.distribution.agreement == 0 and not got.passed
    scaled = compare_arrays("logits", 1.6 * expected, expected, replace(int8, relative_rms=None))
    assert scaled.cosine == pytest.approx(1) and scaled.distribution.agreement == 1 and not scaled.passed
    assert not compare_arrays("out", 1.2 * expected, expected, int8).passed, "the relative error"
    assert compare_arrays("out", 1.1 * expected, expected, int8).passed
    few = compare_arrays("logits", *logits(0.0, shape=(1, 3, 40)), int8).distribution
    assert replace(few, agreeing=2).meets(int8) and not replace(few, agreeing=0).meets(int8)


def test_pooled_embeddings_of_hidden_states():
    """The cosine of each text's mean hidden state, over the positions that count."""
    generator = np.random.default_rng(0)
    expected = generator.standard_normal((3, 7, 16))
    actual = expected + 0.3 * generator.standard_normal(expected.shape)
    rows = np.arange(7) < np.array([[7], [4], [0]])
    got = compare_arrays("last_hidden_state", actual, expected, tolerance_for("int8"), rows)
    cosines = []
    for text, kept in ((0, 7), (1, 4)):
        a, e = actual[text, :kept].mean(0), expected[text, :kept].mean(0)
        cosines.append(float(a @ e / math.sqrt((a @ a) * (e @ e))))
    assert got.pooled is not None and got.pooled.texts == 2
    assert got.pooled.cosine == pytest.approx(np.mean(cosines)) and got.pooled.least == pytest.approx(min(cosines))
    assert got.figures()["pooled_cosine"] == pytest.approx(np.mean(cosines))
    both = merged([got, compare_arrays("last_hidden_state", expected, expected, tolerance_for("int8"))], got.tolerance)
    assert both.pooled is not None and both.pooled.texts == 5
    assert both.pooled.cosine == pytest.approx((sum(cosines) + 3) / 5) and both.pooled.least == got.pooled.least
    assert compare_arrays("last_hidden_state", actual, expected, tolerance_for("fp16")).pooled is None
    assert compare_arrays("logits", actual, expected, tolerance_for("int8")).pooled is None


def test_embeddings_that_turn_fail():
    """A small error that is the same everywhere adds up in a mean, where single errors cancel out."""
    expected = np.random.default_rng(1).standard_normal((2, 400, 16))
    turned = expected + 0.1
    lenient = tolerance_for("int8")
    assert compare_arrays("hidden", turned, expected, lenient).passed
    assert not compare_arrays("last_hidden_state", turned, expected, lenient).passed
    noisy = expected + 0.1 * np.random.default_rng(2).standard_normal(expected.shape)
    assert compare_arrays("hidden", noisy, expected, lenient).passed
