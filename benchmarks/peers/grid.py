"""The grid of the peers' benchmark: its cells, and the choice of some of them.

All windows and element types at n = 1k, 4k and 16k; window 256 in fp32 at 2k, 8k and 32k too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localattn.core.geometry import WindowGeometry

from ..candidates import HEAD_DIM, HEADS

Array = NDArray[Any]
NUMPY_TYPE = {"fp32": np.float32, "fp16": np.float16}

EVERY_LENGTH, SOME_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768), (1024, 4096, 16384)
WINDOWS, MAIN_WINDOW = (64, 256, 512), 256
# By name: look_forward, causal, exact.
GEOMETRIES = {
    "causal exact": (0, True, True),
    "causal block-local": (0, True, False),
    "non-causal": (1, False, False),
}


@dataclass(frozen=True)
class Cell:
    """One place of the grid.

    Args:
        shape: the geometry's name in `GEOMETRIES`.
        window: tokens.
        length: tokens.
        dtype: of query, key and value.
        masked: whether a key mask keeps nine keys of ten.
    """

    shape: str
    window: int
    length: int
    dtype: str
    masked: bool

    @property
    def geometry(self) -> WindowGeometry:
        """Which keys a query sees."""
        forward, causal, exact = GEOMETRIES[self.shape]
        return WindowGeometry(self.window, 1, forward, causal, exact)

    @property
    def name(self) -> str:
        """As steps and targets call it."""
        return f"{self.dtype}, {self.shape}, w={self.window}, n={self.length}{', mask' * self.masked}"

    def to_dict(self) -> dict[str, Any]:
        """As it is stored and filtered."""
        return asdict(self)

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Cell:
        """The cell of a stored row."""
        return cls(**{name: stored[name] for name in cls.__dataclass_fields__})

    def inputs(self) -> dict[str, Array]:
        """Query, key, value, and the key mask if there is one; every query keeps a key."""
        rng = np.random.default_rng(0)
        shape = (1, HEADS, self.length, HEAD_DIM)
        names = ("query", "key", "value")
        feed = {name: rng.standard_normal(shape, dtype=np.float32).astype(NUMPY_TYPE[self.dtype]) for name in names}
        if self.masked:
            feed["key_mask"] = rng.random((1, self.length)) < 0.9
            feed["key_mask"][:, 0] = True
        return feed

    def count_pairs(self, feed: dict[str, Array]) -> int:
        """How many keys all queries of a head see together, those left out that the mask hides."""
        first, end = self.geometry.visible_interval(np.arange(self.length), self.length)
        kept = feed["key_mask"][0] if self.masked else np.ones(self.length, bool)
        before = np.concatenate(([0], np.cumsum(kept)))
        return int((before[end] - before[first]).sum())

    def visible(self, feed: dict[str, Array]) -> NDArray[np.bool_]:
        """`[N, N]`, True where a query sees a kept key."""
        positions = np.arange(self.length)
        seen = self.geometry.visibility(positions, positions, self.length)
        return seen & feed["key_mask"] if self.masked else seen


def cells() -> Iterator[Cell]:
    """The grid."""
    for dtype in NUMPY_TYPE:
        for window in WINDOWS:
            main = window == MAIN_WINDOW and dtype == "fp32"
            for length in EVERY_LENGTH if main else SOME_LENGTHS:
                for shape in GEOMETRIES:
                    for masked in (False, True):
                        yield Cell(shape, window, length, dtype, masked)


_MASKED = {"yes": True, "no": False}
# By name on the command line: field of a cell, the values it may have.
FILTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "geometry": ("shape", {name: name for name in GEOMETRIES}),
    "window": ("window", {str(window): window for window in WINDOWS}),
    "length": ("length", {str(length): length for length in EVERY_LENGTH}),
    "dtype": ("dtype", {name: name for name in NUMPY_TYPE}),
    "mask": ("masked", _MASKED),
}
QUICK = ("length=1024", "window=64,256")


def choose(filters: Sequence[str]) -> list[Cell]:
    """The cells that fit every filter, each `name=value,value`; all without any.

    Raises:
        ValueError: a name or value that the grid does not have.
    """
    chosen = list(cells())
    for text in filters:
        name, _, values = text.partition("=")
        if name not in FILTERS:
            raise ValueError(f"There is no filter {name!r}; known: {', '.join(FILTERS)}.")
        field, known = FILTERS[name]
        if unknown := [value for value in values.split(",") if value not in known]:
            raise ValueError(f"The grid has no {name} {', '.join(unknown)}; it has {', '.join(known)}.")
        wanted = [known[value] for value in values.split(",")]
        chosen = [cell for cell in chosen if getattr(cell, field) in wanted]
    return chosen
