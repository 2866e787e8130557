"""Tell folders that an older transformers wrote, where a field of their config.json means something else today.

The model is loaded as the installed transformers loads it, and file and reference agree about that. Whether the model
that was trained computed the same, nothing in the folder shows: only outputs that were recorded under that release do.

The rows were measured: folders of every type in docs/models.md, written by 4.51.3 and 4.57.6 with several values of
their fields, were run there and under 5.24.0, and compared in fp32. All other types and fields agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ....core.error_texts import shown

Release = tuple[int, int]


class ChangedMeaning(NamedTuple):
    """A field whose meaning changed.

    Args:
        types: of models, as `model_type`.
        since: the first release that wrote it in the old sense.
        before: the first release that does not.
        field: of config.json.
        hit: whether values are touched by the change.
        changed: what changed, in words.
        source: where that can be read.
    """

    types: tuple[str, ...]
    since: Release
    before: Release
    field: str
    hit: Callable[[Mapping[str, Any]], bool]
    changed: str
    source: str


def _halved_once(config: Mapping[str, Any]) -> bool:
    """Return whether a window may be a halved one: published ones are powers of two, and those halved are not."""
    window = config.get("sliding_window")
    return bool(config.get("use_bidirectional_attention")) and isinstance(window, int) and window & (window - 1) != 0


def _theta(config: Mapping[str, Any]) -> object:
    """Return the base of the rotation that older releases wrote, in either place."""
    table = config.get("rope_parameters")
    return config.get("rope_theta", table.get("rope_theta") if isinstance(table, Mapping) else None)


def _some_layers_full(config: Mapping[str, Any]) -> bool:
    limit = config.get("max_window_layers")
    return bool(config.get("use_sliding_window")) and isinstance(limit, int) and limit > 0


CHANGES = (
    ChangedMeaning(
        ("gemma3_text",),
        (4, 57),
        (5, 16),
        "sliding_window",
        _halved_once,
        "with use_bidirectional_attention these releases halve the window when they load it and save the half, so each "
        "save and load halves it again; the model that was saved saw twice as far as the file does",
        "transformers PR #47940",
    ),
    ChangedMeaning(
        ("olmo3",),
        (4, 57),
        (5, 15),
        "rope_theta",
        lambda config: _theta(config) not in (None, 500000),
        "it was the base of every layer's rotation; releases from 5.15 on take 500000 for layers with a window, and "
        "for all layers where it stands in a flat rope_parameters",
        "Olmo3Config of both releases",
    ),
    ChangedMeaning(
        ("qwen2", "qwen3"),
        (4, 0),
        (4, 53),
        "max_window_layers",
        _some_layers_full,
        "in eager and sdpa attention sliding_window masked every layer there; from 4.53 on the first "
        "max_window_layers see all keys",
        "the masks of Qwen2Model in both releases",
    ),
)


def changed_meanings(config: Mapping[str, Any]) -> list[str]:
    """Warn of the fields of a config.json whose meaning changed since the release that wrote it."""
    written = config.get("transformers_version")
    release = _release(written)
    if release is None:
        return []
    from transformers import __version__

    old = f"transformers {shown(written)[1:-1]}"
    return [
        f"config.json was written by {old}, and {row.field}{_value(config, row.field)} has another meaning in "
        f"{__version__}: {row.changed} ({row.source}). If the model was trained under {old}, record it there, "
        'localattn.record(model, inputs, "golden.npz"), and prove the file: localattn parity FILE --golden golden.npz'
        for row in CHANGES
        if config.get("model_type") in row.types and row.since <= release < row.before and row.hit(config)
    ]


def _value(config: Mapping[str, Any], field: str) -> str:
    return f" ({shown(config[field])})" if field in config else ""


def _release(written: object) -> Release | None:
    found = re.match(r"(\d+)\.(\d+)", written) if isinstance(written, str) else None
    return None if found is None else (int(found[1]), int(found[2]))
