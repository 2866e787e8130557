"""What a model's folder says about writing text with it: when to stop, and how to sample.

`generation_config.json` has it, as `transformers` writes that file; `config.json` and `tokenizer_config.json` know the
tokens that end a text where it does not. All come from outside and are read as data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.limits import LARGEST_SIZE
from ...core.storage.reading import read_json, read_plain
from .tokenizer import FolderTokenizer

GENERATION, CONFIG, TOKENIZER_CONFIG = "generation_config.json", "config.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
_MOST_BYTES = 32 << 20
_MOST_STOPS = 4096
_FIX = "Copy the original again."
# What transformers takes where the file does not say.
_TOP_K = 50
# Values that only tokens that are drawn have.
_DRAWN = frozenset(("temperature", "top_k", "top_p"))


@dataclass(frozen=True)
class FolderDefaults:
    """What a folder says.

    Args:
        stop: tokens that end a text.
        do_sample: whether tokens are drawn; None where the folder has no `generation_config.json`.
        sampling: arguments of `Sampling`, for tokens that are drawn.
        template: the chat template, in Jinja; None without one.
        special: names of special tokens for it, as `bos_token`.
        max_new_tokens: most tokens to generate; None where the folder does not say.
        max_length: most tokens of prompt and text together, where `max_new_tokens` does not say.
    """

    stop: tuple[int, ...] = ()
    do_sample: bool | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    max_new_tokens: int | None = None
    max_length: int | None = None

    def most_tokens(self, prompt_length: int) -> int | None:
        """Return how many tokens the folder allows after a prompt; None where it does not say.

        Raises:
            UsageError: the prompt is as long as all may be.
        """
        if self.max_new_tokens is not None or self.max_length is None:
            return self.max_new_tokens
        if prompt_length >= self.max_length:
            raise UsageError(
                f"The prompt has {prompt_length} tokens, and {GENERATION} allows {self.max_length} with the text.",
                why="Its max_length counts the prompt.",
                fix=f"Say how many tokens to generate: {argument('max_tokens')}.",
            )
        return self.max_length - prompt_length

    def settings(self, do_sample: bool | None = None, **given: float | None) -> dict[str, Any]:
        """Return the arguments of `Sampling`: those that are given, the folder's for the others.

        Args:
            do_sample: whether tokens are drawn; None: if a value for that is given, else as the folder says, and where
                it says nothing, too.
            given: arguments of `Sampling`; None leaves one to the folder.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        if do_sample is None:
            drawn = not chosen.keys().isdisjoint(_DRAWN) or self.do_sample in (True, None)
        else:
            drawn = do_sample
        values = {**self.sampling, **chosen}
        return values if drawn else {**{x: y for x, y in values.items() if x not in _DRAWN}, "temperature": 0.0}


def read_defaults(folder: Path, tokenizer: FolderTokenizer | None) -> FolderDefaults:
    """Read what a folder says.

    Args:
        folder: where the step file lies.
        tokenizer: of the folder.

    Raises:
        UsageError: a file is no JSON object, too large, or states a value of another type.
    """
    generation, config, names = (_read(folder / name) for name in (GENERATION, CONFIG, TOKENIZER_CONFIG))
    special = {
        name: text for name in ("bos_token", "eos_token", "pad_token", "unk_token") if (text := _text(names, name))
    }
    stop = _stops(generation, folder / GENERATION) or _stops(config, folder / CONFIG)
    if not stop and tokenizer is not None and "eos_token" in special:
        known = tokenizer.token(special["eos_token"])
        stop = () if known is None else (known,)
    if not (folder / GENERATION).is_file():
        return FolderDefaults(stop, template=_template(folder, names), special=special)
    drawn, sampling = generation.get("do_sample") is True, _sampling(generation, folder / GENERATION)
    counts = ("max_new_tokens", "max_length")
    most = (_checked(generation, name, folder / GENERATION, _is_count, "counts tokens") for name in counts)
    return FolderDefaults(stop, drawn, sampling, _template(folder, names), special, *most)


def _read(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; an absent file is an empty one."""
    if not path.is_file():
        return {}
    found = read_json(path, _MOST_BYTES, _FIX)
    if not isinstance(found, dict):
        raise UsageError(f"{path} is no JSON object.", fix=_FIX)
    return found


def _text(names: Mapping[str, Any], name: str) -> str | None:
    """Return a special token: a text, or an object with its text as `content`."""
    found = names.get(name)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def _checked(values: Mapping[str, Any], name: str, path: Path, fits: Callable[[Any], bool], wrong: str) -> Any:
    """Return a value that fits; None where the file has none."""
    found = values.get(name)
    if found is not None and not fits(found):
        raise UsageError(f"{path} cannot be used.", why=f"{name} {wrong}.", fix=_FIX)
    return found


def _is_count(found: Any) -> bool:
    return type(found) is int and 1 <= found <= LARGEST_SIZE  # a bool is an int too


def _is_number(found: Any) -> bool:
    return type(found) in (int, float) and abs(found) <= sys.float_info.max


def _are_tokens(found: Any) -> bool:
    listed = found if isinstance(found, list) else [found]
    return len(listed) <= _MOST_STOPS and all(type(x) is int and x >= 0 for x in listed)


def _stops(values: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    found = _checked(values, "eos_token_id", path, _are_tokens, "is no list of tokens")
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)


def _sampling(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return arguments of `Sampling`."""
    names = ("temperature", "top_p", "repetition_penalty")
    numbers = {name: _checked(values, name, path, _is_number, "is no number") for name in names}
    found: dict[str, Any] = {name: float(number) for name, number in numbers.items() if number is not None}
    stated = {"top_k": _TOP_K, **values}
    top_k = _checked(stated, "top_k", path, lambda x: type(x) is int, "is no whole number")
    return {**found, "top_k": top_k} if top_k else found


def _template(folder: Path, names: Mapping[str, Any]) -> str | None:
    path = folder / TEMPLATE
    if path.is_file():
        try:
            raw = read_plain(path, _MOST_BYTES)
            return raw[:_MOST_BYTES].decode("utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read.", why=f"{error}.", fix=_FIX) from error
    found = names.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
