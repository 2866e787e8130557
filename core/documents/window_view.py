"""Describe the windows of a model for reports: which keys some queries see, through one layer and through all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..geometry import WindowGeometry

# Larger sizes cannot be real; files of other programs may contain them, and they would overflow 64 bits in a picture.
_LARGEST = 1 << 31
# Tokens that show the pattern of a layer without a window.
_SHOWN = 64


@dataclass(frozen=True)
class WindowExample:
    """What one query sees: keys `[first, end)` in its layer, inputs `[deep_first, deep_end)` through all layers."""

    query: int
    first: int
    end: int
    deep_first: int
    deep_end: int


@dataclass(frozen=True)
class WindowView:
    """Attention layers that have the same window.

    Args:
        geometry: the window.
        layers: names of the layers.
        length: tokens a sequence; None where the file does not say.
        biases: these are AFT-local layers: every key counts, and the window says which have a learned bias.
    """

    geometry: WindowGeometry
    layers: tuple[str, ...]
    length: int | None = None
    biases: bool = False

    @property
    def depth(self) -> int:
        """Number of layers; reports assume that each follows the previous one."""
        return max(1, len(self.layers))

    @property
    def sequence(self) -> int:
        """The length of the sequence; if unknown, enough tokens to show the pattern."""
        return self.length or self.pattern

    @property
    def pattern(self) -> int:
        """Number of tokens that show the pattern: the keys of one window, and one window on each side."""
        if self.biases:
            return 3 * self.geometry.keys_per_window
        if self.geometry.sees_all:
            return _SHOWN
        return self.geometry.keys_per_window + 2 * self.geometry.window_size

    def describe(self) -> str:
        """Describe the window in words."""
        if not self.biases:
            return self.geometry.describe()
        direction = "causal" if self.geometry.causal else "non-causal"
        return f"{direction}, learned biases up to {self.geometry.backward_reach} positions away, 0 beyond"

    def example(self, query: int) -> WindowExample:
        """Return what one query sees."""
        first, end = self.geometry.visible_interval(np.array([query]), self.sequence)
        if self.biases:
            deep = (0, query + 1 if self.geometry.causal else self.sequence)
        else:
            deep = self.geometry.receptive_interval(query, self.sequence, self.depth)
        return WindowExample(query, int(first[0]), int(end[0]), *deep)

    def examples(self) -> list[WindowExample]:
        """Return examples: queries on both sides of the first window's edge, in the middle, and the last."""
        window, last = self.geometry.window_size, self.sequence - 1
        queries = sorted({0, min(window - 1, last), min(window, last), last // 2, last})
        return [self.example(query) for query in queries]

    def to_dict(self) -> dict[str, Any]:
        """Return the view as JSON types; `from_dict` reads them back."""
        return {
            **asdict(self.geometry),
            "layers": list(self.layers),
            "length": self.length,
            "biases": self.biases,
            "window": self.describe(),
            "examples": [asdict(example) for example in self.examples()],
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> WindowView:
        """Read a view that `to_dict` saved."""
        names = WindowGeometry.__dataclass_fields__
        geometry = WindowGeometry(**{name: saved[name] for name in names})
        return cls(geometry, tuple(saved["layers"]), saved["length"], saved["biases"])


def views(windows: Iterable[tuple[str, WindowGeometry]], length: int | None) -> list[WindowView]:
    """Group layers with the same window, in the order of their first layers; skip impossible sizes."""
    grouped: dict[WindowGeometry, list[str]] = {}
    for name, geometry in windows:
        if geometry.keys_per_window <= _LARGEST:
            grouped.setdefault(geometry, []).append(name)
    return [WindowView(geometry, tuple(names), _possible(length)) for geometry, names in grouped.items()]


def bias_views(name: str, window: int, causal: bool, length: int | None) -> list[WindowView]:
    """Return the view of an AFT-local layer's biases, for the `window` - 1 positions on each side."""
    reach = window - 1
    if not 0 <= reach <= _LARGEST:
        return []
    geometry = WindowGeometry(
        window_size=1,
        look_backward=reach,
        look_forward=0 if causal else reach,
        causal=causal,
        exact_windowsize=True,
    )
    return [WindowView(geometry, (name,), _possible(length), biases=True)]


def _possible(length: int | None) -> int | None:
    return None if length is None or length > _LARGEST else length
