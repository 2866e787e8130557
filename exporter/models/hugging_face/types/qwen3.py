"""Qwen 3, whose configuration changed its meaning as that of Qwen 2 did."""

from __future__ import annotations

from ..quirks import Quirks
from .qwen2 import Qwen2


class Qwen3(Qwen2):
    """The type `qwen3`."""


QUIRKS: Quirks = Qwen3()
