"""The text model of Gemma 3, whose window some releases halved again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..changed_meaning import ChangedMeaning
from ..quirks import Quirks


def _halved_once(config: Mapping[str, Any]) -> bool:
    """Return whether a window may be a halved one: published ones are powers of two, and those halved are not."""
    window = config.get("sliding_window")
    return bool(config.get("use_bidirectional_attention")) and isinstance(window, int) and window & (window - 1) != 0


class Gemma3Text(Quirks):
    """The type `gemma3_text`."""

    changed_meanings = (
        ChangedMeaning(
            (4, 57),
            (5, 16),
            "sliding_window",
            _halved_once,
            "with use_bidirectional_attention these releases halve the window when they load it and save the half, so "
            "each save and load halves it again; the model that was saved saw twice as far as the file does",
            "transformers PR #47940",
        ),
    )


QUIRKS: Quirks = Gemma3Text()
