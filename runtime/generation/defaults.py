"""Read a model's defaults for generation from its folder: when to stop, and how to sample.

`generation_config.json` has it, as `transformers` writes that file; `config.json` and `tokenizer_config.json` know the
tokens that end a text where it does not. All come from outside and are read as data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...core.error_texts import argument, shown
from ...core.errors import UsageError
from ...core.storage.reading import read_json, read_plain
from .fields import DRAWS, FIELDS, SCORES, Field, is_token
from .stop_strings import StopStrings
from .tokenizer import TOKENIZER, FolderTokenizer

GENERATION, CONFIG, TOKENIZER_CONFIG = "generation_config.json", "config.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
_MOST_BYTES = 32 << 20
# The most unknown fields that are named; a file may have any number.
_MOST_NAMED = 8
_FIX = "Copy the original again."
# Defaults of transformers if the file does not state a value.
_TOP_K = 50
_REAL = ("temperature", "top_p", "repetition_penalty")


@dataclass(frozen=True)
class FolderDefaults:
    """The defaults in a folder.

    Args:
        stop: tokens that end a text.
        do_sample: whether tokens are drawn; None if the folder has no `generation_config.json`.
        sampling: arguments of `Sampling`, those for drawn tokens too.
        template: the chat template, in Jinja; None without one.
        special: names of special tokens for it, as `bos_token`.
        max_new_tokens: most tokens to generate; None where the folder does not say.
        max_length: most tokens of prompt and text together, where `max_new_tokens` does not say.
        bos: the token that begins a text; None where the folder does not say.
        max_time: seconds after which a text ends; None for any.
        stop_strings: strings that end a text.
        notes: what `generation_config.json` asks for that is not applied, a sentence each.
        path: of `generation_config.json`, for errors.
    """

    stop: tuple[int, ...] = ()
    do_sample: bool | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    max_new_tokens: int | None = None
    max_length: int | None = None
    bos: int | None = None
    max_time: float | None = None
    stop_strings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    path: str = GENERATION

    def most_tokens(self, prompt_length: int) -> int | None:
        """Return how many tokens the folder allows after a prompt; None if it does not say.

        Raises:
            UsageError: the prompt is as long as all may be.
        """
        if self.max_new_tokens is not None or self.max_length is None:
            return self.max_new_tokens
        if prompt_length >= self.max_length:
            raise UsageError(
                f"The prompt has {prompt_length} tokens, and {GENERATION} allows {self.max_length} with the text.",
                why="Its max_length includes the prompt.",
                fix=f"Set the number of tokens to generate: {argument('max_tokens')}.",
            )
        return self.max_length - prompt_length

    def settings(self, do_sample: bool | None = None, **given: float | None) -> dict[str, Any]:
        """Return the arguments of `Sampling`: the given ones, and the folder's for the others.

        Args:
            do_sample: whether tokens are drawn; None: if a value for that is given, else as the folder says, and where
                it says nothing, too.
            given: arguments of `Sampling`; None leaves one to the folder.

        Raises:
            UsageError: a value of the folder that counts here is outside its range.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        if do_sample is None:
            drawn = not chosen.keys().isdisjoint(DRAWS) or self.do_sample in (True, None)
        else:
            drawn = do_sample
        values = {**self.sampling, **chosen}
        if not drawn:
            values = {**{name: value for name, value in values.items() if name not in DRAWS}, "temperature": 0.0}
        for name, value in values.items():
            if name not in chosen:
                _check(FIELDS[name], value, self.path)
        return values

    def ending(self, tokenizer: FolderTokenizer | None) -> dict[str, Any]:
        """Return the arguments of `Generator.generate` about the end of a text, the number of tokens apart.

        Args:
            tokenizer: of the folder; without it no string ends a text.
        """
        found: dict[str, Any] = {"stop": self.stop}
        if self.max_time is not None:
            found["max_time"] = self.max_time
        if self.stop_strings and tokenizer is not None:
            found["stop_strings"] = StopStrings(self.stop_strings, tokenizer.text_of)
        return found


def read_defaults(folder: Path, tokenizer: FolderTokenizer | None) -> FolderDefaults:
    """Read what a folder says.

    Args:
        folder: the step file's folder.
        tokenizer: of the folder; None where it has none.

    Raises:
        UsageError: a file is not a JSON object, is too large, or has a value of a wrong type.
    """
    path = folder / GENERATION
    stated = path.is_file()
    generation = _read(path)
    # In the folder of another kind of model, files with these names may have any content.
    read = _read if stated or tokenizer is not None else _read_if_object
    config, names = read(folder / CONFIG), read(folder / TOKENIZER_CONFIG)
    special = {
        name: text for name in ("bos_token", "eos_token", "pad_token", "unk_token") if (text := _text(names, name))
    }
    for name, row in FIELDS.items():
        _check(row, generation.get(name), path, in_use=row.role == "ending")
    stop = _stops(generation, path) or _stops(config, folder / CONFIG)
    if not stop and tokenizer is not None and "eos_token" in special:
        known = tokenizer.token(special["eos_token"])
        stop = () if known is None else (known,)
    found = FolderDefaults(
        stop, template=_template(folder, names), special=special, bos=_bos(generation, config, special, tokenizer)
    )
    if not stated:
        return found
    texts = generation.get("stop_strings")
    return replace(
        found,
        do_sample=generation.get("do_sample") is True,
        sampling=_sampling(generation),
        max_new_tokens=generation.get("max_new_tokens"),
        max_length=generation.get("max_length"),
        max_time=generation.get("max_time"),
        stop_strings=(texts,) if isinstance(texts, str) else tuple(texts or ()),
        notes=tuple(_notes(generation, tokenizer)),
        path=str(path),
    )


def _check(row: Field, value: Any, path: Path | str, *, in_use: bool = True) -> None:
    """Refuse a value of a field that cannot be used."""
    if wrong := row.wrong(value, in_use=in_use):
        raise UsageError(f"{path} cannot be used.", why=f"{row.name} is {shown(value)}. {wrong}", fix=_FIX)


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `Sampling`: stated values that have an effect."""
    found = {name: values[name] for name in (*SCORES, *DRAWS) if values.get(name) is not None}
    top_k = values.get("top_k")
    if top_k is None:
        found["top_k"] = _TOP_K
    elif top_k == 0:
        del found["top_k"]
    return {name: float(value) if type(value) is int and name in _REAL else value for name, value in found.items()}


def _notes(values: Mapping[str, Any], tokenizer: FolderTokenizer | None) -> Iterator[str]:
    """Yield requests that are not applied."""
    for name, value in values.items():
        row = FIELDS.get(name)
        if row is not None and row.missing and value is not None and row.active(value):
            yield f"{GENERATION}: {name} is {shown(value)} and not applied, because {row.missing}"
    if values.get("stop_strings") is not None and tokenizer is None:
        yield f"{GENERATION}: stop_strings is not applied, because there is no {TOKENIZER} to read tokens with"
    unknown = [name for name in values if name not in FIELDS]
    if unknown:
        named = ", ".join(shown(name).strip("'\"") for name in unknown[:_MOST_NAMED])
        more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        verb = "is" if len(unknown) == 1 else "are"
        yield f"{GENERATION}: {named}{more} {verb} not applied, because transformers' generate has no such field"


def _bos(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    special: Mapping[str, str],
    tokenizer: FolderTokenizer | None,
) -> int | None:
    """Return the token that begins a text, from the first file that knows it."""
    for values in (generation, config):
        found = values.get("bos_token_id")
        if found is not None and is_token(found):
            return int(found)
    return tokenizer.token(special["bos_token"]) if tokenizer is not None and "bos_token" in special else None


def _read_if_object(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; return an empty one for a missing or invalid file."""
    try:
        return _read(path)
    except UsageError:
        return {}


def _read(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; return an empty one for a missing file."""
    if not path.is_file():
        return {}
    found = read_json(path, _MOST_BYTES, _FIX)
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not a JSON object.", fix=_FIX)
    return found


def _text(names: Mapping[str, Any], name: str) -> str | None:
    """Return a special token: a text, or an object with its text as `content`."""
    found = names.get(name)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def _stops(values: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    found = values.get("eos_token_id")
    _check(FIELDS["eos_token_id"], found, path)
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)


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
