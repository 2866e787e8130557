"""Scores and kept tokens against transformers' own classes, made by its own `_get_logits_processor`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from localattn.core.errors import CheckFailed, UsageError
from localattn.runtime.generation.fields import DRAWS, FIELDS, SCORES
from localattn.runtime.generation.sampler import Sampler
from localattn.runtime.generation.sampling import Sampling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

VOCABULARY, STOP, LIMIT = 40, (3, 7), 6
# Of each field: values that do something, at their edges too.
VALUES: dict[str, list[Any]] = {
    "sequence_bias": [[[[5], -3.0], [[1, 5], 2.5], [[2, 1, 5], 4.0]], [[[8], float("-inf")], [[0, 0, 0, 0, 0], 1.0]]],
    "encoder_repetition_penalty": [1.7, 0.4],
    "repetition_penalty": [1.3, 0.5, 1e4],
    "no_repeat_ngram_size": [1, 2, 3, 50],
    "encoder_no_repeat_ngram_size": [1, 2, 4],
    "bad_words_ids": [[[4], [1, 2], [3]], [[9, 9, 1], [2, 1], [7]]],
    "min_length": [3, 9, 200],
    "min_new_tokens": [1, 4],
    "forced_bos_token_id": [6, 0],
    "forced_eos_token_id": [3, [7, 3], 0],
    "remove_invalid_values": [True],
    "exponential_decay_length_penalty": [[1, 1.5], [0, 0.9], [2, 3.0]],
    "suppress_tokens": [[1, 2, 30], [-1, 500]],
    "begin_suppress_tokens": [[11, 0]],
    "temperature": [0.3, 2.0],
    "top_h": [0.3, 0.9],  # at 1 rounding decides about the last token
    "top_k": [1, 5, 400],
    "top_p": [0.1, 0.8],
    "min_p": [0.0, 0.2, 1.0],
    "typical_p": [0.1, 0.9],
    "epsilon_cutoff": [0.0, 0.02, 0.6],
    "eta_cutoff": [0.001, 0.3],
}


class Model(transformers.GenerationMixin):
    """As much of a model as `_get_logits_processor` looks at."""

    config = transformers.PretrainedConfig(vocab_size=VOCABULARY)


def theirs(settings: dict[str, Any], prompt: int) -> Any:
    """Return transformers' list of processors for these settings, as `generate` prepares them."""
    config = transformers.GenerationConfig(**settings, eos_token_id=list(STOP))
    config.update(**config._get_default_generation_params(), defaults_only=True)
    config.max_length = prompt + LIMIT
    if config.min_new_tokens is not None:
        config.min_length = prompt + config.min_new_tokens
    config.do_sample = not settings.keys().isdisjoint(DRAWS)
    if not config.do_sample or "top_k" not in settings:
        config.top_k = None
    config._eos_token_tensor = torch.tensor(STOP)
    return config, lambda ids: Model()._get_logits_processor(config, prompt, encoder_input_ids=ids, device="cpu")


def compare(settings: dict[str, Any], seed: int = 0, prompt: int = 9) -> int:
    """Compare along a text of random tokens; return how many scores differ from the logits."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 12, (2, prompt))
    drawn = not settings.keys().isdisjoint(DRAWS)
    sampling = Sampling(**{"temperature": 1.0 if drawn else 0.0, **settings})
    sampler = Sampler(sampling, 0, range(2), stop=STOP, max_tokens=LIMIT)
    sampler.see(text, VOCABULARY)
    _, make = theirs(settings, prompt)
    processors, changed = make(torch.from_numpy(text)), 0
    for _ in range(LIMIT):
        logits = (3 * rng.standard_normal((2, VOCABULARY))).astype(np.float32)
        wanted = processors(torch.from_numpy(text), torch.from_numpy(logits.copy())).numpy()
        changed += int((wanted != logits).sum())
        for row in range(2):
            scores = sampler.scores(row, logits[row])
            if not np.isfinite(wanted[row].max()):  # a length penalty beyond fp32: here it ends at the largest number
                assert np.isfinite(scores.max()) and "exponential_decay_length_penalty" in settings
                continue
            if not drawn:
                np.testing.assert_array_equal(scores, wanted[row])
                continue
            tokens, weights = sampling.kept(scores)
            chances = torch.from_numpy(wanted[row].astype(np.float64)).softmax(0).numpy()
            ours = np.zeros(VOCABULARY)
            ours[tokens] = weights / weights.sum()
            np.testing.assert_allclose(ours, chances, rtol=2e-5, atol=1e-7)
            # fp32 decides about tokens of no weight beside a sure one.
            assert not [n for n in range(VOCABULARY) if (ours[n] > 0) != (chances[n] > 0) and ours[n] > 1e-7]
        text = np.concatenate((text, rng.integers(0, 12, (2, 1))), axis=1)
        for row, (known, _processors) in enumerate(sampler._rows):
            known.add(int(text[row, -1]))
    return changed


def test_every_field_has_values_here() -> None:
    assert set(VALUES) == {*SCORES, *DRAWS}


@pytest.mark.parametrize("name", VALUES)
def test_each_field_does_what_it_does_in_transformers(name: str) -> None:
    changed = sum(compare({name: value}, seed, prompt) for value in VALUES[name] for seed, prompt in ((0, 9), (1, 1)))
    assert changed > 0 or name == "remove_invalid_values", "the values did nothing, so nothing was compared"


def test_fields_together_come_in_the_order_of_transformers() -> None:
    rng = np.random.default_rng(5)
    tried = 0
    for seed in range(60):
        names = rng.choice(list(VALUES), 5, replace=False)
        settings = {name: VALUES[name][int(rng.integers(len(VALUES[name])))] for name in names}
        if {"forced_eos_token_id", "forced_bos_token_id"} & set(names):
            settings.pop("suppress_tokens", None)
            settings.pop("bad_words_ids", None)
        try:
            compare(settings, seed, int(rng.choice([1, 9])))
        except UsageError as error:
            assert "forbid all" in error.what
            continue
        tried += 1
    assert tried > 50


@pytest.mark.slow
def test_pairs_of_fields() -> None:
    refused = 0
    pairs = list(itertools.combinations(VALUES, 2))
    for first, second in pairs:
        for one, two in itertools.product(VALUES[first], VALUES[second]):
            try:
                compare({first: one, second: two}, 3)
            except (UsageError, ValueError):  # all tokens forbidden; transformers refuses some of these too
                refused += 1
    assert refused < 10


def test_long_texts_and_padding_before_prompts() -> None:
    rng = np.random.default_rng(2)
    text, mask = rng.integers(0, 9, (2, 700)), np.ones((2, 700), np.int64)
    mask[1, :600] = 0
    text[1, :600] = 30
    logits = rng.standard_normal((2, VOCABULARY)).astype(np.float32)
    sampler = Sampler(Sampling(0, repetition_penalty=1.4, no_repeat_ngram_size=3), 0, range(2))
    sampler.see(text, VOCABULARY, mask)
    config = transformers.GenerationConfig(repetition_penalty=1.4, no_repeat_ngram_size=3)
    config._eos_token_tensor = None
    kwargs = {"attention_mask": torch.from_numpy(mask)}
    made = Model()._get_logits_processor(config, 700, torch.from_numpy(text), device="cpu", model_kwargs=kwargs)
    wanted = made(torch.from_numpy(text), torch.from_numpy(logits.copy())).numpy()
    for row in range(2):
        np.testing.assert_array_equal(sampler.scores(row, logits[row]), wanted[row])
    assert wanted[1, 30] == logits[1, 30] and (wanted[0] != logits[0]).any()


def test_invalid_values_are_removed_only_where_that_is_asked_for() -> None:
    logits = np.array([[0.5, np.nan, np.inf, -np.inf, 2.0]], np.float32)
    wanted = transformers.InfNanRemoveLogitsProcessor()(None, torch.from_numpy(logits)).numpy()
    sampler = Sampler(Sampling(0, remove_invalid_values=True), 0, range(1))
    assert sampler.choose(logits).tolist() == [2]
    np.testing.assert_array_equal(sampler.scores(0, logits[0]), wanted[0])
    with pytest.raises(CheckFailed, match="not finite"):
        Sampler(Sampling(0, suppress_tokens=[0]), 0, range(1)).choose(logits)


def test_settings_that_leave_no_token_are_named() -> None:
    ones = Sampler(Sampling(0, no_repeat_ngram_size=1), 0, range(1))
    ones.see([0, 1], 2)
    with pytest.raises(UsageError) as caught:
        ones.choose(np.zeros((1, 2), np.float32))
    assert "no_repeat_ngram_size" in caught.value.why
    sampler = Sampler(Sampling(0, suppress_tokens=list(range(5))), 0, range(1))
    with pytest.raises(UsageError, match="forbid all") as caught:
        sampler.choose(np.zeros((1, 5), np.float32))
    assert "suppress_tokens" in caught.value.why
    # A row that has ended needs none.
    assert sampler.choose(np.zeros((1, 5), np.float32), np.array([True])).tolist() == [0]


@pytest.mark.parametrize(
    "settings",
    [
        {"bad_words_ids": [[5]]},
        {"sequence_bias": [[[1, 5], 1.0]]},
        {"forced_eos_token_id": 5},
        {"forced_bos_token_id": 5},
        {"exponential_decay_length_penalty": [0, 2.0]},
    ],
)
def test_tokens_that_the_model_does_not_have_are_said(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        Sampler(Sampling(0, **settings), 0, range(1), max_tokens=3).see([1], 5)


def test_a_length_penalty_never_leaves_the_range_of_numbers() -> None:
    sampler = Sampler(Sampling(0, exponential_decay_length_penalty=(0, 1e6)), 0, range(1), stop=[2])
    sampler.see([1], 5)
    sampler._rows[0][0].add(1)
    for _ in range(100):
        assert sampler.choose(np.array([[4.0, 1.0, 0.5, 0.0, 0.0]], np.float32)).tolist() == [2]


def test_fields_are_those_of_transformers() -> None:
    """Every field of its `GenerationConfig` is known here, and none that it does not know does anything."""
    known = set(vars(transformers.GenerationConfig())) | {"_commit_hash"}
    assert known <= set(FIELDS), known - set(FIELDS)
    assert set(FIELDS) <= known, set(FIELDS) - known
