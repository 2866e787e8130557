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
        (5, 0),
        "rope_theta",
        lambda config: config.get("rope_theta") not in (None, 500000, 500000.0),
        "it was the base of every layer; releases from 5.0 on give the layers with a window the base 500000",
        "Olmo3Config and Olmo3RotaryEmbedding of both releases",
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

    return [
        f"config.json was written by transformers {shown(written)}, and {row.field} ({shown(config.get(row.field))}) "
        f"has another meaning in {__version__}: {row.changed} ({row.source}). If the model was trained under "
        f'{shown(written)}, record it there, localattn.record(model, inputs, "golden.npz"), and prove the file: '
        "localattn parity FILE --golden golden.npz"
        for row in CHANGES
        if config.get("model_type") in row.types and row.since <= release < row.before and row.hit(config)
    ]


def _release(written: object) -> Release | None:
    found = re.match(r"(\d+)\.(\d+)", written) if isinstance(written, str) else None
    return None if found is None else (int(found[1]), int(found[2]))
