"""Qwen 2, whose first layers see all keys in newer releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..changed_meaning import ChangedMeaning
from ..quirks import Quirks


def _some_layers_full(config: Mapping[str, Any]) -> bool:
    limit = config.get("max_window_layers")
    return bool(config.get("use_sliding_window")) and isinstance(limit, int) and limit > 0


class Qwen2(Quirks):
    """The type `qwen2`."""

    changed_meanings = (
        ChangedMeaning(
            (4, 0),
            (4, 53),
            "max_window_layers",
            _some_layers_full,
            "in eager and sdpa attention sliding_window masked every layer there; from 4.53 on the first "
            "max_window_layers see all keys",
            "the masks of Qwen2Model in both releases",
        ),
    )


QUIRKS: Quirks = Qwen2()
