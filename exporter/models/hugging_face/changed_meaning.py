"""Tell folders that an older transformers wrote, where a field of their config.json means something else today.

The model is loaded as the installed transformers loads it, and file and reference agree about that. Whether the model
that was trained computed the same, nothing in the folder shows: only outputs that were recorded under that release do.

The fields stand in the files of their types (`types/`). They were measured: folders of every type in docs/models.md,
written by 4.51.3 and 4.57.6 with several values of their fields, were run there and under 5.24.0, and compared in fp32.
All other types and fields agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ....core.error_texts import shown

Release = tuple[int, int]


class ChangedMeaning(NamedTuple):
    """A field whose meaning changed.

    Args:
        since: the first release that wrote it in the old sense.
        before: the first release that does not.
        field: of config.json.
        hit: whether values are touched by the change.
        changed: what changed, in words.
        source: where that can be read.
    """

    since: Release
    before: Release
    field: str
    hit: Callable[[Mapping[str, Any]], bool]
    changed: str
    source: str


def warnings_of(changes: Sequence[ChangedMeaning], config: Mapping[str, Any]) -> list[str]:
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
        for row in changes
        if row.since <= release < row.before and row.hit(config)
    ]


def _value(config: Mapping[str, Any], field: str) -> str:
    return f" ({shown(config[field])})" if field in config else ""


def _release(written: object) -> Release | None:
    found = re.match(r"(\d+)\.(\d+)", written) if isinstance(written, str) else None
    return None if found is None else (int(found[1]), int(found[2]))
