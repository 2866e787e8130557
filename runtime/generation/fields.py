"""List the fields of generation_config.json: allowed values, and their effect here.

Names, neutral values and order are those of transformers 5.24: `GenerationConfig`, and what `generate` makes of it in
`_get_logits_processor` and `_get_stopping_criteria`. A row says one of four things about a field: it changes the
scores, it changes only how tokens are drawn, it says where a text begins and ends, or it does nothing here. What does
nothing here but would in transformers says so, in `missing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from ...core.error_texts import argument
from ...core.limits import LARGEST_SIZE

# Longest lists: of tokens, of sequences of tokens, of texts. A step looks at each entry.
_MOST_TOKENS, _MOST_SEQUENCES, _MOST_TEXTS = 1 << 20, 1 << 16, 4096
_MOST_STOPS = 4096
# Larger values make scores leave the range of fp32 (1e38), or make a penalty meaningless.
_LEAST_FACTOR, _LARGEST_FACTOR, _LARGEST_BIAS = 1e-6, 1e6, 1e30

Role = Literal["scores", "draw", "ending", "none"]
Test = Callable[[Any], bool]


@dataclass(frozen=True)
class Field:
    """One field.

    Args:
        name: as in the file, and as an argument of `Sampling`.
        role: what it changes.
        is_kind: whether a value has the right type.
        kind: the type in words, to follow "It must be:".
        fits: whether a value of that type is in its range; looked at only where the field is in use.
        range: that range, as it follows "It must be".
        missing: why a value other than a neutral one is not applied.
        active: whether a value asks for what is missing.
        neutral: a number that does nothing; None where every number does something.
    """

    name: str
    role: Role
    is_kind: Test
    kind: str
    fits: Test = lambda _: True
    range: str = ""
    missing: str = ""
    active: Test = lambda _: True
    neutral: int | None = None

    def asks(self, value: Any) -> bool:
        """Return whether a value has an effect."""
        return value is not None and value is not False and (self.neutral is None or value != self.neutral)

    def wrong(self, value: Any, *, in_use: bool = True) -> str:
        """Return why a value cannot be used, as a sentence; empty if it can, or is None.

        Args:
            value: any.
            in_use: whether the field changes anything, so that its range counts.
        """
        if value is None:
            return ""
        if not self.is_kind(value):
            return f"It must be: {self.kind}."
        return f"It must be {self.range}." if in_use and not self.fits(value) else ""


def is_whole(value: Any) -> bool:
    """Check for an integer that fits in 64 bits; a bool does not count."""
    return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < 1 << 63


def is_number(value: Any) -> bool:
    """Check for a finite number; a bool does not count."""
    if isinstance(value, Integral):
        return is_whole(value)
    return isinstance(value, Real) and math.isfinite(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_list(value: Any, most: int, entry: Test) -> bool:
    return isinstance(value, list | tuple) and len(value) <= most and all(map(entry, value))


def is_token(value: Any) -> bool:
    """Check for the number of a token."""
    return is_whole(value) and value >= 0


def _are_whole(value: Any) -> bool:
    return _is_list(value, _MOST_TOKENS, is_whole)


def are_stops(value: Any) -> bool:
    """Check for a token or a list of tokens that end a text."""
    return is_token(value) or _is_list(value, _MOST_STOPS, is_token)


def _is_sequence(value: Any) -> bool:
    return _is_list(value, _MOST_TOKENS, is_token) and len(value) > 0


def _are_sequences(value: Any) -> bool:
    return _is_list(value, _MOST_SEQUENCES, _is_sequence) and sum(map(len, value)) <= _MOST_TOKENS


def _is_bias(value: Any) -> bool:
    return is_number(value) or (isinstance(value, float) and value == -math.inf)


def _are_biases(value: Any) -> bool:
    def pair(entry: Any) -> bool:
        return isinstance(entry, list | tuple) and len(entry) == 2 and _is_sequence(entry[0]) and _is_bias(entry[1])

    return _is_list(value, _MOST_SEQUENCES, pair) and sum(len(entry[0]) for entry in value) <= _MOST_TOKENS


def _is_decay(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and is_whole(value[0]) and is_number(value[1])


def _are_texts(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return _is_list(texts, _MOST_TEXTS, lambda text: isinstance(text, str) and 0 < len(text) <= _MOST_TEXTS)


def _between(least: float, largest: float) -> Test:
    return lambda value: least <= value <= largest


def _share(value: Any) -> bool:
    return bool(0 < value <= 1)


_FACTOR = (_between(_LEAST_FACTOR, _LARGEST_FACTOR), f"from {_LEAST_FACTOR:g} to {_LARGEST_FACTOR:g}; 1 does nothing")
_COUNT = (_between(0, LARGEST_SIZE), f"from 0 (none) to {LARGEST_SIZE}")
_LENGTH = (_between(1, LARGEST_SIZE), f"from 1 to {LARGEST_SIZE}")
_SHARE = (_share, "more than 0, at most 1")
_CLOSED = (_between(0, 1), "from 0 to 1")
_NUMBER, _WHOLE, _FLAG = (is_number, "finite number"), (is_whole, "whole number"), (_is_flag, "true or false")
_TOKEN, _STOPS = (is_token, "token"), (are_stops, f"token or list of at most {_MOST_STOPS} tokens")
_TOKENS = (_are_whole, f"list of at most {_MOST_TOKENS} tokens")
_SEQUENCES = (_are_sequences, "list of lists of tokens")
_TEXT = (lambda value: isinstance(value, str), "text")
_OBJECT = (lambda value: isinstance(value, dict), "object")
_ANYTHING = (lambda _: True, "value")


def _not_there(name: str, kind: tuple[Test, str], missing: str, active: Test = lambda _: True) -> Field:
    return Field(name, "none", *kind, missing=missing, active=active)


_BEAMS, _ASSISTED = "beam search is not supported", "assisted decoding is not supported"
_ROWS = (
    # Fields that change the scores, in the order of transformers.
    Field(
        "sequence_bias",
        "scores",
        _are_biases,
        "list of [list of tokens, number]",
        lambda value: len(value) > 0 and all(bias <= _LARGEST_BIAS for _, bias in value),
        f"a list of at least one, with biases up to {_LARGEST_BIAS:g}",
    ),
    Field("encoder_repetition_penalty", "scores", *_NUMBER, *_FACTOR, neutral=1),
    Field("repetition_penalty", "scores", *_NUMBER, *_FACTOR, neutral=1),
    Field("no_repeat_ngram_size", "scores", *_WHOLE, *_COUNT, neutral=0),
    Field("encoder_no_repeat_ngram_size", "scores", *_WHOLE, *_COUNT, neutral=0),
    Field("bad_words_ids", "scores", *_SEQUENCES, lambda value: len(value) > 0, "a list of at least one"),
    Field("min_length", "scores", *_WHOLE, *_COUNT, neutral=0),
    Field("min_new_tokens", "scores", *_WHOLE, *_COUNT, neutral=0),
    Field("forced_bos_token_id", "scores", *_TOKEN),
    Field("forced_eos_token_id", "scores", *_STOPS),
    Field("remove_invalid_values", "scores", *_FLAG),
    Field(
        "exponential_decay_length_penalty",
        "scores",
        _is_decay,
        "list of [tokens, factor]",
        lambda value: 0 <= value[0] <= LARGEST_SIZE and 0 < value[1] <= _LARGEST_FACTOR,
        f"a start from 0 and a factor of more than 0, at most {_LARGEST_FACTOR:g}",
    ),
    Field("suppress_tokens", "scores", *_TOKENS),
    Field("begin_suppress_tokens", "scores", *_TOKENS),
    # Fields that control how tokens are drawn, in the order of transformers.
    Field("temperature", "draw", *_NUMBER, lambda value: value >= 0, "0 (greedy) or more: it divides the logits"),
    Field("top_h", "draw", *_NUMBER, *_SHARE),
    Field("top_k", "draw", *_WHOLE, lambda value: value >= 1, "1 or more: at least one token must stay"),
    Field("top_p", "draw", *_NUMBER, *_SHARE),
    Field("min_p", "draw", *_NUMBER, *_CLOSED),
    Field("typical_p", "draw", *_NUMBER, *_SHARE),
    Field("epsilon_cutoff", "draw", *_NUMBER, *_CLOSED),
    Field("eta_cutoff", "draw", *_NUMBER, *_CLOSED),
    # Fields that control where a text begins and ends.
    Field("bos_token_id", "ending", *_TOKEN),
    Field("eos_token_id", "ending", *_STOPS),
    Field("do_sample", "ending", *_FLAG),
    Field("max_length", "ending", *_WHOLE, *_LENGTH),
    Field("max_new_tokens", "ending", *_WHOLE, *_LENGTH),
    Field("max_time", "ending", *_NUMBER, lambda value: value >= 0, "0 seconds or more"),
    Field("stop_strings", "ending", _are_texts, "text or list of texts"),
    # Fields that this package does not support.
    _not_there("num_beams", _WHOLE, _BEAMS, lambda value: value > 1),
    _not_there("num_beam_groups", _WHOLE, _BEAMS, lambda value: value > 1),
    _not_there("constraints", _ANYTHING, _BEAMS),
    _not_there("force_words_ids", _ANYTHING, _BEAMS),
    _not_there("penalty_alpha", _NUMBER, "contrastive search is not supported", lambda value: value > 0),
    _not_there("dola_layers", _ANYTHING, "DoLa decoding is not supported"),
    _not_there("use_mtp", _FLAG, _ASSISTED, bool),
    _not_there("prompt_lookup_num_tokens", _WHOLE, _ASSISTED),
    _not_there("assistant_early_exit", _WHOLE, _ASSISTED),
    _not_there(
        "guidance_scale", _NUMBER, "guidance, which runs the model twice, is not supported", lambda value: value != 1
    ),
    _not_there("watermarking_config", _OBJECT, "watermarks, which need PyTorch's random numbers, are not supported"),
    _not_there("token_healing", _FLAG, "token healing is not supported", bool),
    _not_there("num_return_sequences", _WHOLE, f"{argument('batch')} sets the number", lambda value: value > 1),
    _not_there("cache_implementation", _TEXT, "caches are not quantised", lambda value: value == "quantized"),
    # What changes no token without beams, an assistant model or an encoder; or how transformers runs, and what it
    # returns. Renormalised logits have the same order and are drawn alike.
    *(Field(name, "none", *_FLAG) for name in ("renormalize_logits", "use_cache", "low_memory", "disable_compile")),
    *(Field(name, "none", *_FLAG) for name in ("output_attentions", "output_hidden_states", "output_scores")),
    *(Field(name, "none", *_FLAG) for name in ("output_logits", "return_dict_in_generate", "is_assistant")),
    *(Field(name, "none", *_NUMBER) for name in ("length_penalty", "diversity_penalty")),
    *(Field(name, "none", *_NUMBER) for name in ("assistant_confidence_threshold", "assistant_ensemble_weight")),
    *(Field(name, "none", *_WHOLE) for name in ("num_assistant_tokens", "assistant_lookbehind", "target_lookbehind")),
    *(Field(name, "none", *_WHOLE) for name in ("max_matching_ngram_size", "max_cache_len", "prefill_chunk_size")),
    *(Field(name, "none", *_OBJECT) for name in ("compile_config", "continuous_batching_config")),
    Field("num_assistant_tokens_schedule", "none", *_TEXT),
    Field("speculation_type", "none", *_TEXT),
    Field("cache_config", "none", *_OBJECT),
    Field("early_stopping", "none", lambda value: _is_flag(value) or value == "never", "true, false or never"),
    Field("pad_token_id", "none", *_WHOLE),
    Field("decoder_start_token_id", "none", lambda value: is_whole(value) or _are_whole(value), "token"),
    *(Field(name, "none", *_ANYTHING) for name in ("transformers_version", "_from_model_config", "_commit_hash")),
)
FIELDS: Mapping[str, Field] = {row.name: row for row in _ROWS}
SCORES = tuple(row.name for row in _ROWS if row.role == "scores")
DRAWS = tuple(row.name for row in _ROWS if row.role == "draw")
