"""Sampling against the plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localattn.core.errors import CheckFailed, UsageError
from localattn.runtime.generation.sampler import Sampler
from localattn.runtime.generation.sampling import Sampling

logit_rows = st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=40).map(np.array)


def naive(logits, temperature, top_k, top_p):
    """One token after the other, in order of probability and then of id."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = [token for token in order if top_k is None or logits[token] >= logits[order[:top_k][-1]]]
    weight = {token: float(np.exp((logits[token] - max(logits)) / temperature)) for token in kept}
    total = sum(weight.values())
    kept, reached = {}, 0.0
    for token, value in weight.items():
        if top_p is not None and reached >= top_p:
            break
        kept[token] = value / total
        reached += value / total
    total = sum(kept.values())
    return np.array([kept.get(token, 0.0) / total for token in range(len(logits))])


def probabilities(sampling, logits):
    """Of all tokens, from the weights of those that are kept."""
    tokens, weights = sampling.kept(logits)
    spread = np.zeros(len(logits))
    spread[tokens] = weights / weights.sum()
    return spread


@settings(max_examples=300)
@given(
    logits=logit_rows,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, 45),
    # Away from sums that the coarse logits reach exactly, where rounding decides.
    top_p=st.none() | st.sampled_from([0.0371, 0.3137, 0.6653, 0.9371, 0.99913]),
)
def test_probabilities_are_those_of_the_formula(logits, temperature, top_k, top_p):
    got = probabilities(Sampling(temperature, top_k, top_p), logits.astype(np.float32))
    np.testing.assert_allclose(got, naive(logits, temperature, top_k, top_p), atol=1e-12)


def test_top_k_keeps_what_is_as_likely_as_the_last_one():
    """As transformers does, so that no token depends on its number."""
    got = probabilities(Sampling(top_k=3), np.array([1.0, 2.0, 1.0, 1.0, 1.0, 0.0]))
    assert np.flatnonzero(got).tolist() == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_most_probable_even_when_it_alone_is_enough():
    logits = np.log([0.1, 0.6, 0.3])
    assert np.flatnonzero(probabilities(Sampling(top_p=1e-9), logits)).tolist() == [1]
    assert np.flatnonzero(probabilities(Sampling(top_p=0.61), logits)).tolist() == [1, 2]
    assert np.flatnonzero(probabilities(Sampling(top_p=1.0), logits)).tolist() == [0, 1, 2]


@given(logits=logit_rows, uniform=st.floats(0, 1, exclude_max=True))
def test_temperature_zero_is_greedy(logits, uniform):
    assert Sampling(0, 5, 0.5).choose(logits, uniform) == int(np.argmax(logits))
    assert probabilities(Sampling(0), logits)[np.argmax(logits)] == 1


@settings(max_examples=200)
@given(logits=logit_rows, uniform=st.floats(0, 1, exclude_max=True), top_k=st.none() | st.integers(1, 5))
def test_a_draw_inverts_the_cumulated_probability(logits, uniform, top_k):
    sampling = Sampling(1.0, top_k)
    probability = probabilities(sampling, logits)
    token = sampling.choose(logits, uniform)
    assert probability[token] > 0
    assert probability[:token].sum() <= uniform + 1e-12 and uniform < probability[: token + 1].sum() + 1e-12


def test_the_largest_uniform_draws_a_kept_token():
    logits = np.array([0.0, 1.0, -5.0])
    assert Sampling(top_k=2).choose(logits, float(np.nextafter(1, 0))) == 1


def test_frequencies_follow_the_probabilities():
    sampling = Sampling(0.8, top_k=4, top_p=0.97)
    logits = np.array([0.3, 1.5, -0.2, 0.9, 0.1, -2.0])
    sampler = Sampler(sampling, 5, range(1))
    drawn = np.array([sampler.choose(logits[None])[0] for _ in range(20_000)])
    frequency = np.bincount(drawn, minlength=6) / len(drawn)
    probability = probabilities(sampling, logits)
    # Five standard deviations of a frequency.
    assert (np.abs(frequency - probability) <= 5 * np.sqrt(probability * (1 - probability) / len(drawn))).all()


def test_rows_draw_from_streams_of_their_own():
    logits = np.zeros((3, 1000))
    draws = {}
    for rows in (range(3), range(1, 3), range(2, 3)):
        sampler = Sampler(Sampling(), 11, rows)
        drawn = np.array([sampler.choose(logits[: len(rows)]) for _ in range(5)])
        draws |= {(rows.start, row): drawn[:, row - rows.start].tolist() for row in rows}
    assert draws[0, 2] == draws[1, 2] == draws[2, 2] and draws[0, 1] == draws[1, 1]
    assert draws[0, 0] != draws[0, 1] != draws[0, 2]
    other = Sampler(Sampling(), 12, range(1))
    assert [int(other.choose(logits[:1])[0]) for _ in range(5)] != draws[0, 0]


@pytest.mark.parametrize("bad", [[0.0, np.nan], [0.0, np.inf], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(bad, temperature):
    with pytest.raises(CheckFailed, match="not finite"):
        Sampling(temperature).choose(np.array(bad, np.float32), 0.5)


def test_minus_infinity_is_a_token_that_never_comes():
    probability = probabilities(Sampling(), np.array([-np.inf, 0.0, 0.0], np.float32))
    assert probability.tolist() == [0, 0.5, 0.5]


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": -0.1},
        {"temperature": np.nan},
        {"temperature": np.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": "0.5"},
        {"top_k": True},
        {"repetition_penalty": 1e-300},
        {"min_p": 1.5},
        {"top_h": 0},
        {"suppress_tokens": 5},
        {"bad_words_ids": [[]]},
        {"sequence_bias": {"1": 2.0}},
        {"no_repeat_ngram_size": 2.5},
        {"exponential_decay_length_penalty": [1]},
    ],
)
def test_wrong_settings_are_refused(arguments):
    with pytest.raises(UsageError):
        Sampling(**arguments)


def test_a_negative_seed_is_refused():
    with pytest.raises(UsageError, match="`seed` is -1"):
        Sampler(Sampling(), -1, range(1))
