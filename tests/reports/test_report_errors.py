"""How errors are spread, against plain numpy; and charts that show it."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as xml

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localattn.core import closeness
from localattn.core.documents.error_spread import BINS_PER_DECADE, MOST_POINTS, ErrorSpread
from localattn.core.documents.window_view import WindowView, bias_views, views
from localattn.core.geometry import WindowGeometry
from localattn.core.tolerance import Tolerance
from localattn.reports.svg.drawing import Axis, power
from localattn.reports.svg.errors import Step, error_histogram, error_positions, error_steps
from localattn.reports.svg.window import reach_picture, shown, window_picture
from localattn.runtime.parity.comparison import compare_arrays
from localattn.runtime.parity.spread import SequenceAxis

LOOSE = Tolerance(1e-2, 1e-2)


def arrays(shape=(3, 50, 7), seed=0):
    generator = np.random.default_rng(seed)
    expected = generator.standard_normal(shape)
    error = 10 ** generator.uniform(-9, -1, shape)
    error[generator.random(shape) < 0.1] = 0
    return expected + error, expected


@pytest.mark.parametrize("chunk", [64, 1 << 18])
@pytest.mark.parametrize(("shape", "axis"), [((3, 50, 7), 1), ((3, 50, 7), -2), ((50, 3, 7), 0), ((2, 3, 50, 4), -2)])
def test_the_spread_is_that_of_numpy(monkeypatch, chunk, shape, axis):
    monkeypatch.setattr(closeness, "_CHUNK", chunk)
    actual, expected = arrays(shape)
    spread = compare_arrays("out", actual, expected, LOOSE, sequence=SequenceAxis(axis)).spread
    error = np.abs(actual - expected)
    others = tuple(i for i in range(error.ndim) if i != axis % error.ndim)
    assert spread.largest == tuple(error.max(others))
    assert spread.beyond == tuple((error > LOOSE.atol + LOOSE.rtol * np.abs(expected)).sum(others))
    assert spread.positions == tuple(range(50)) and spread.width == 1
    assert spread.zero == (error == 0).sum() and spread.total == error.size
    for low, high, count in spread.bins():
        assert count == ((error >= 10**low) & (error < 10**high)).sum()
    for exponent, count in spread.decades():
        assert count == ((error >= 10.0**exponent) & (error < 10.0 ** (exponent + 1))).sum()
    assert sum(count for _, count in spread.decades()) == sum(spread.counts)


def test_long_sequences_are_told_in_stretches():
    length = 3 * MOST_POINTS - 5
    actual, expected = arrays((1, length, 2))
    spread = compare_arrays("out", actual, expected, LOOSE, sequence=SequenceAxis(1)).spread
    error = np.abs(actual - expected).max((0, 2))
    assert spread.width == 3 and len(spread.positions) == len(spread.largest) <= MOST_POINTS
    assert spread.largest == tuple(error[start : start + 3].max() for start in spread.positions)
    assert sum(spread.beyond) == (np.abs(actual - expected) > LOOSE.atol + LOOSE.rtol * np.abs(expected)).sum()


def test_positions_that_were_chosen_keep_their_places():
    positions = np.array([0, 1, 2, 90, 91])
    actual, expected = arrays((1, 5, 3))
    spread = compare_arrays("out", actual, expected, LOOSE, sequence=SequenceAxis(1, positions)).spread
    assert spread.positions == (0, 1, 2, 90, 91)
    lines = [p.get("d") for p in drawn(error_positions(spread, 1e-4, 8), "path") if p.get("class") == "line s0"]
    assert [line.count("L") for line in lines] == [2, 1], "no line crosses what was left out"


def test_nan_and_inf_are_counted_where_they_are():
    actual, expected = arrays((2, 10, 3))
    actual[1, 4, 2], actual[0, 4, 0], actual[0, 7, 1] = np.nan, np.inf, -np.inf
    spread = compare_arrays("out", actual, expected, Tolerance(1e9, 0), sequence=SequenceAxis(1)).spread
    assert spread.beyond == (0, 0, 0, 0, 2, 0, 0, 1, 0, 0)
    assert spread.total == actual.size - 3 and all(map(math.isfinite, spread.largest))


def test_nobody_asked():
    assert compare_arrays("out", *arrays(), LOOSE).spread is None


def test_extreme_errors_are_counted_at_the_ends():
    actual, expected = np.array([1e-30, 1e30, 5e-324, 0.0]), np.zeros(4)
    spread = compare_arrays("out", actual, expected, LOOSE, sequence=SequenceAxis(0)).spread
    assert spread.total == 4 and spread.zero == 1
    assert spread.decades()[0] == (-20, 2) and spread.decades()[-1] == (20, 1)


def test_a_spread_is_kept_through_json():
    made = compare_arrays("out", *arrays(), LOOSE, sequence=SequenceAxis(1))
    assert ErrorSpread.from_dict(json.loads(json.dumps(made.spread.to_dict()))) == made.spread


@settings(max_examples=40)
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_merging_is_comparing_both_together(first, second):
    pairs = [arrays((1, 6, 4), seed) for seed in (first, second)]
    merged, other = (compare_arrays("o", a, e, LOOSE, sequence=SequenceAxis(1)).spread for a, e in pairs)
    both = np.concatenate([a for a, _ in pairs]), np.concatenate([e for _, e in pairs])
    assert merged.merge(other) == compare_arrays("o", *both, LOOSE, sequence=SequenceAxis(1)).spread


def drawn(drawing, kind):
    return list(xml.fromstring(str(drawing)).iter(kind))


def test_a_histogram_has_a_bar_for_every_bin_with_errors():
    spread = ErrorSpread(zero=5, first_bin=-6 * BINS_PER_DECADE, counts=(100, 0, 10, 1))
    answer = [next(rect.iter("title")).text for rect in drawn(error_histogram(spread, 1e-4), "rect")]
    assert answer == ["1e-06 to 1.78e-06: 100", "3.16e-06 to 5.62e-06: 10", "5.62e-06 to 1e-05: 1", "no error: 5"]
    tall, middle, short, _ = (float(rect.get("height")) for rect in drawn(error_histogram(spread, 1e-4), "rect"))
    assert tall - middle == pytest.approx(middle - short, abs=0.3), "equal steps are equal factors"


@pytest.mark.parametrize("spread", [ErrorSpread(3, 0, (), (0, 1, 2), 1, (0, 0, 0), (0, 0, 0)), ErrorSpread(0, 0, (1,))])
@pytest.mark.parametrize("atol", [0.0, 1e-4, 1e9])
def test_charts_of_no_error_and_no_tolerance(spread, atol):
    assert "nan" not in str(error_histogram(spread, atol)) and "inf" not in str(error_histogram(spread, atol))
    if spread.positions:
        assert "nan" not in str(error_positions(spread, atol, 2))


def test_positions_out_of_tolerance_stand_out():
    spread = ErrorSpread(0, -12, (4,), (0, 1, 2, 3), 1, (1e-3, 2e-3, 5e-3, 1e-3), (0, 0, 7, 0))
    drawing = error_positions(spread, 1e-3, 2)
    marked = [dot for dot in drawn(drawing, "circle") if dot.get("class") == "bad"]
    assert [next(dot.iter("title")).text for dot in marked] == ["position 2: 0.005, 7 out of tolerance"]
    heights = [float(dot.get("cy")) for dot in drawn(drawing, "circle")]
    assert heights[2] < heights[1] < heights[0] == heights[3]


def test_steps_mark_the_fault():
    steps = [Step("a", 1e-7, True), Step("b", 1e-2, False), Step("c", math.inf, False), Step("d", 0.0, True)]
    drawing = error_steps(steps, 1)
    assert "first fault: b" in [text.text for text in drawn(drawing, "text")]
    a, b, c, d = (float(dot.get("cy")) for dot in drawn(drawing, "circle"))
    assert c <= b < a < d
    assert "fault" not in str(error_steps(steps[:1], None))


@pytest.mark.parametrize(("exponent", "answer"), [(-6, "10⁻⁶"), (0, "1"), (2, "100"), (3, "10³"), (-12.0, "10⁻¹²")])
def test_powers_of_ten(exponent, answer):
    assert power(exponent) == answer


@given(st.integers(-30, 30), st.integers(1, 40))
def test_an_axis_of_powers_has_few_marks(low, width):
    marks = Axis("x", low, low + width, powers=True).marks()
    assert 1 <= len(marks) <= 8 and all(low <= value <= low + width for value, _ in marks)


GEOMETRIES = [
    WindowGeometry(4, causal=True),
    WindowGeometry(4, 1, 1),
    WindowGeometry(3, 2, 0, exact_windowsize=True),
    WindowGeometry(5, 1, 2, exact_windowsize=True),
    WindowGeometry(4, 0, 0),
    WindowGeometry(2, 3, causal=True, exact_windowsize=True),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=WindowGeometry.describe)
@pytest.mark.parametrize("length", [None, 1, 7, 64])
def test_the_picture_fills_exactly_the_visible_pairs(geometry, length):
    view = WindowView(geometry, ("layer",), length)
    size = shown(view)
    drawing = window_picture(view)
    (path,) = (p.get("d") for p in drawn(drawing, "path") if p.get("class") == "seen")
    frame = next(rect for rect in drawn(drawing, "rect") if rect.get("class") == "hidden")
    left, top, unit = (float(frame.get(name)) for name in ("x", "y", "width"))
    unit /= size
    filled = np.zeros((size, size), bool)
    for piece in path.split("Z")[:-1]:
        start, right, bottom = piece[1:].replace("V", "H").split("H")[:3]
        x0, y0 = map(float, start.split())
        cells = [(x0 - left) / unit, (float(right) - left) / unit, (y0 - top) / unit, (float(bottom) - top) / unit]
        first, end, above, below = map(round, cells)
        assert not filled[above:below, first:end].any()
        filled[above:below, first:end] = True
    everywhere = np.arange(size)
    assert (filled == geometry.visibility(everywhere, everywhere, view.sequence)).all()


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=WindowGeometry.describe)
def test_examples_are_what_the_geometry_says(geometry):
    view = WindowView(geometry, ("a", "b"), 40)
    for example in view.examples():
        seen = np.flatnonzero(geometry.visibility(np.array([example.query]), np.arange(40), 40)[0])
        assert (example.first, example.end) == (seen[0], seen[-1] + 1)
        deeper = np.flatnonzero(geometry.visibility(seen, np.arange(40), 40).any(0))
        assert (example.deep_first, example.deep_end) == (deeper[0], deeper[-1] + 1)
    assert WindowView.from_dict(json.loads(json.dumps(view.to_dict()))) == view
    answer = [next(rect.iter("title"), None) for rect in drawn(reach_picture(view, 39), "rect")]
    assert [title.text for title in answer if title is not None][-1].startswith("2 layers: ")


def test_layers_with_the_same_window_share_a_picture():
    one, other = GEOMETRIES[:2]
    found = views([("a", one), ("b", other), ("c", one)], 64)
    assert [(view.geometry, view.layers) for view in found] == [(one, ("a", "c")), (other, ("b",))]


@pytest.mark.parametrize("causal", [False, True])
def test_learned_biases_reach_as_far_as_their_table(causal):
    (view,) = bias_views("aft", 3, causal, 10)
    example = view.example(5)
    assert (example.first, example.end) == (3, 6 if causal else 8)
    assert (example.deep_first, example.deep_end) == (0, 6 if causal else 10)
    assert "learned biases up to 2 positions away" in view.describe()
