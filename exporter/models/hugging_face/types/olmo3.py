"""Olmo 3, whose layers with a window have a rotation of their own in newer releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..changed_meaning import ChangedMeaning
from ..quirks import Quirks


def _theta(config: Mapping[str, Any]) -> object:
    """Return the base of the rotation that older releases wrote, in either place."""
    table = config.get("rope_parameters")
    return config.get("rope_theta", table.get("rope_theta") if isinstance(table, Mapping) else None)


class Olmo3(Quirks):
    """The type `olmo3`."""

    changed_meanings = (
        ChangedMeaning(
            (4, 57),
            (5, 15),
            "rope_theta",
            lambda config: _theta(config) not in (None, 500000),
            "it was the base of every layer's rotation; releases from 5.15 on take 500000 for layers with a window, "
            "and for all layers where it stands in a flat rope_parameters",
            "Olmo3Config of both releases",
        ),
    )


QUIRKS: Quirks = Olmo3()
