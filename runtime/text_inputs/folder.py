"""Read the special tokens, the padding and the chat template of a model's folder.

All files come from outside and are read as data. Damaged files are skipped with a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import LocalAttnError
from ...core.storage.reading import read_json

_TOKENIZER_CONFIG, _CONFIG, _GENERATION = "tokenizer_config.json", "config.json", "generation_config.json"
_MOST_BYTES = 32 << 20
_TEMPLATE = "chat_template.jinja"
# Tokens that a sequence may begin with: their names in `config.json`, with `_id`, and in `tokenizer_config.json`.
_OPENING = ("bos_token", "cls_token", "eos_token", "decoder_start_token", "sep_token", "pad_token")
_MASK, _PAD = "mask_token", "pad_token"


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a model.

    Args:
        ids: name of the field that states it, as `bos_token`, → its numbers.
        texts: the same, as texts, where the tokenizer's files have them.
        left: batches are padded on the left.
        adds_first: the texts that `add_bos_token` puts before each text.
        adds_last: the texts that `add_eos_token` puts after each text.
        template: text of the chat template, "" without one.
        notes: what could not be read.
    """

    ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left: bool = False
    adds_first: tuple[str, ...] = ()
    adds_last: tuple[str, ...] = ()
    template: str = ""
    notes: tuple[str, ...] = ()


def of_config(config: Mapping[str, Any]) -> SpecialTokens:
    """Return the special tokens that a `config.json` states."""
    return SpecialTokens(ids=dict(_ids(config)))


def of_folder(folder: Path, config: Mapping[str, Any] | None = None) -> SpecialTokens:
    """Return the special tokens that a folder states.

    Args:
        folder: the model's folder, or that of its exported file.
        config: its `config.json`, where it is known; None reads it.
    """
    notes: list[str] = []
    raw = _read(folder / _CONFIG, notes) if config is None else config
    names = _read(folder / _TOKENIZER_CONFIG, notes)
    texts = {name: found for name in (*_OPENING, _MASK) if (found := _texts(names.get(name)))}
    texts |= _additional(names)
    adds = {
        name: texts.get(name, ()) if names.get(f"add_{name}") is True else () for name in ("bos_token", "eos_token")
    }
    return SpecialTokens(
        _merged(dict(_ids(raw)), dict(_ids(_read(folder / _GENERATION, notes)))),
        texts,
        names.get("padding_side") == "left",
        adds["bos_token"],
        adds["eos_token"],
        _template(folder, names),
        tuple(notes),
    )


def _ids(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the special tokens of a configuration by name, including its text part."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for name in (*_OPENING, _MASK):
            found = part.get(f"{name}_id")
            listed = found if isinstance(found, list) else [found]
            ids = tuple(x for x in listed if isinstance(x, int) and not isinstance(x, bool) and x >= 0)
            if ids:
                yield name, ids


def _merged(ids: Mapping[str, tuple[int, ...]], more: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Add special tokens that another file states to those of one, which come first."""
    return {name: tuple(dict.fromkeys((*ids.get(name, ()), *more.get(name, ())))) for name in (*ids, *more)}


def _texts(found: Any) -> tuple[str, ...]:
    """Return special tokens: a text, an object with its text as `content`, or several of them."""
    if isinstance(found, list):
        return tuple(text for one in found for text in _texts(one))
    text = found.get("content") if isinstance(found, dict) else found
    return (text,) if isinstance(text, str) and text else ()


def _additional(names: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the special tokens beyond the usual ones: transformers 4 lists them, 5 gives them names as well."""
    found = {name: _texts(names.get(name)) for name in ("additional_special_tokens", "extra_special_tokens")}
    extra = names.get("extra_special_tokens")
    if isinstance(extra, dict):
        found["extra_special_tokens"] = tuple(text for one in extra.values() for text in _texts(one))
    return {name: texts for name, texts in found.items() if texts}


def _template(folder: Path, names: Mapping[str, Any]) -> str:
    """Return the text of the chat template, "" if there is none; it is searched but not run."""
    path = folder / _TEMPLATE
    try:
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = names.get("chat_template")
    return found if isinstance(found, str) else ""


def _read(path: Path, notes: list[str]) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = read_json(path, _MOST_BYTES, "Copy the original again.")
    except LocalAttnError as error:
        notes.append(f"{path.name} is not read: {error.why or error.what}")
        return {}
    return found if isinstance(found, dict) else {}
