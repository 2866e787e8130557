"""The window intervals against upstream's masks and against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localattn.core.errors import UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import NodeAttributes, choose_query_block, geometry_of

from ..support.reference import upstream_visibility


@st.composite
def geometries(draw: st.DrawFn) -> WindowGeometry:
    causal = draw(st.booleans())
    return WindowGeometry(
        window_size=draw(st.integers(1, 9)),
        look_backward=draw(st.integers(0, 3)),
        look_forward=0 if causal else draw(st.integers(0, 2)),
        causal=causal,
        exact_windowsize=draw(st.booleans()),
    )


lengths = st.integers(1, 60)
fast = settings(max_examples=150)


def dense(geometry: WindowGeometry, length: int) -> np.ndarray:
    """Visibility written out from the intervals alone."""
    first, end = geometry.visible_interval(np.arange(length), length)
    seen = np.zeros((length, length), dtype=bool)
    for query in range(length):
        seen[query, first[query] : end[query]] = True
    return seen


@fast
@given(geometries(), lengths)
def test_intervals_are_upstreams_masks(geometry: WindowGeometry, length: int) -> None:
    expected = upstream_visibility(geometry, length)
    t = np.arange(length)
    np.testing.assert_array_equal(dense(geometry, length), expected)
    np.testing.assert_array_equal(geometry.visibility(t, t, length), expected)


@fast
@given(geometries(), lengths, st.data())
def test_visibility_of_some_positions(geometry: WindowGeometry, length: int, data: st.DataObject) -> None:
    some = st.lists(st.integers(0, length - 1), min_size=1, max_size=8)
    query, key = (np.array(data.draw(some)) for _ in range(2))
    expected = upstream_visibility(geometry, length)[np.ix_(query, key)]
    np.testing.assert_array_equal(geometry.visibility(query, key, length), expected)


@fast
@given(geometries(), lengths)
def test_ends_are_monotone_and_enclose_the_query(geometry: WindowGeometry, length: int) -> None:
    t = np.arange(length)
    first, end = geometry.visible_interval(t, length)
    assert (np.diff(first) >= 0).all() and (np.diff(end) >= 0).all()
    assert (first <= t).all() and (t < end).all()
    assert first.min() >= 0 and end.max() <= length


@fast
@given(geometries())
def test_keys_per_window_bounds_every_interval(geometry: WindowGeometry) -> None:
    length = 3 * geometry.keys_per_window
    first, end = geometry.visible_interval(np.arange(length), length)
    counts = end - first
    w, b, f = geometry.window_size, geometry.look_backward, geometry.look_forward
    assert geometry.keys_per_window == (b + 1 + f) * w
    assert counts.max() <= geometry.keys_per_window
    if geometry.exact_windowsize:
        assert counts.max() == (w * b + 1 if geometry.causal else (b + f) * w + 1)
    elif geometry.causal:
        assert counts.max() == (b + 1) * w
    else:
        assert counts[geometry.keys_per_window] == geometry.keys_per_window
    assert (geometry.backward_reach, geometry.forward_reach) == (b * w, f * w)


@fast
@given(geometries(), lengths, st.integers(0, 5))
def test_receptive_interval_is_reachability(geometry: WindowGeometry, length: int, depth: int) -> None:
    step = upstream_visibility(geometry, length)
    reached = np.eye(length, dtype=bool)
    for _ in range(depth):
        reached = reached @ step
    for query in range(length):
        low, high = geometry.receptive_interval(query, length, depth)
        np.testing.assert_array_equal(np.flatnonzero(reached[query]), np.arange(low, high))


@fast
@given(geometries(), lengths)
def test_mean_visible_keys_counts_them(geometry: WindowGeometry, length: int) -> None:
    expected = upstream_visibility(geometry, length).sum() / length
    assert geometry.mean_visible_keys(length) == pytest.approx(expected)


@fast
@given(geometries())
def test_attributes_carry_the_geometry(geometry: WindowGeometry) -> None:
    assert geometry_of(dict(NodeAttributes(geometry, 1.0).as_onnx())) == geometry


@fast
@given(geometries(), st.integers(1, 300), st.booleans())
def test_query_block_holds_whole_windows_where_it_must(geometry: WindowGeometry, length: int, has_bias: bool) -> None:
    block = choose_query_block(geometry, length, has_bias=has_bias)
    if has_bias or not geometry.exact_windowsize:
        assert block == geometry.window_size
    else:
        assert 1 <= block <= 128


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"window_size": 0}, "window_size"),
        ({"window_size": -3}, "window_size"),
        ({"window_size": 4, "look_backward": -1}, "look_backward"),
        ({"window_size": 4, "look_forward": -1}, "look_forward"),
        ({"window_size": 4, "look_forward": 1, "causal": True}, "causal"),
    ],
)
def test_impossible_windows_are_refused(arguments: dict[str, int], word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        WindowGeometry(**arguments)
    assert caught.value.why


def test_description_names_every_number() -> None:
    text = WindowGeometry(7, 2, 3, exact_windowsize=True).describe()
    assert text == "non-causal exact, window 7, 2 back, 3 forward"
    assert WindowGeometry(7, causal=True).describe() == "causal block-local, window 7, 1 back, 0 forward"
