"""Define which keys a query sees: the one definition of visibility.

Every query's visible keys form one interval `[lo(t), hi(t))` whose ends never decrease with `t`. The
float64 reference, the ONNX function, the window check and the kernel all read the interval from here.

With `w = window_size`, `b = look_backward`, `f = look_forward` and `i = t // w`:

================  =========================  =======================================
                  `lo(t)`                    `hi(t)`
================  =========================  =======================================
block-local       `(i - b)·w`                causal `t + 1`, else `(i + 1 + f)·w`
exact             `t - b·w`                  causal `t + 1`, else `t + f·w + 1`
================  =========================  =======================================

both clipped to `[0, n]`. A window of `ALL_KEYS` holds any sequence, so its queries see all keys.

Source: `local_attention.LocalAttention.forward` (the masks on `bq_t` and `bq_k`), local-attention 1.11.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    IntArray = NDArray[np.int64]

# The size of a window that holds any sequence, because no sequence is longer.
ALL_KEYS = 2**31


@dataclass(frozen=True)
class WindowGeometry:
    """The shape of a local attention window.

    Args:
        window_size: queries per window, `w` ≥ 1.
        look_backward: whole windows seen before a query's own, `b` ≥ 0.
        look_forward: whole windows seen after it, `f` ≥ 0; 0 if causal.
        causal: a query sees no later key.
        exact_windowsize: distances are limited to `b·w` back and `f·w` forward, ends included
            (FlashAttention's window), instead of to whole windows.

    Raises:
        UsageError: a value outside these ranges.
    """

    window_size: int
    look_backward: int = 1
    look_forward: int = 0
    causal: bool = False
    exact_windowsize: bool = False

    def __post_init__(self) -> None:
        if self.window_size < 1:
            raise UsageError(f"window_size is {self.window_size}.", why="A window holds at least one token.")
        if self.look_backward < 0 or self.look_forward < 0:
            raise UsageError(
                f"look_backward is {self.look_backward} and look_forward is {self.look_forward}.",
                why="Both count whole windows and cannot be negative.",
            )
        if self.causal and self.look_forward:
            raise UsageError(
                f"look_forward is {self.look_forward} in a causal model.",
                why="In a causal model, a query sees no later token.",
                fix="Set look_forward to 0 or causal to false.",
            )

    @classmethod
    def reaching(cls, backward: int, forward: int) -> WindowGeometry:
        """Return the exact window in which a query sees `back` positions back and `ahead` positions ahead, inclusive.

        The two may differ: `window_size` is their greatest common divisor.

        Raises:
            UsageError: one of them is negative.
        """
        window = max(1, gcd(backward, forward))
        return cls(window, backward // window, forward // window, causal=forward == 0, exact_windowsize=True)

    @classmethod
    def all_keys(cls, *, causal: bool) -> WindowGeometry:
        """Return the geometry without a window: a query sees every key, or if causal every key up to itself."""
        return cls(ALL_KEYS, 0, 0, causal=causal)

    @property
    def sees_all(self) -> bool:
        """Whether there is no window: a query sees every key, or if causal every key up to itself."""
        return self.window_size >= ALL_KEYS

    @property
    def keys_per_window(self) -> int:
        """Number of keys gathered for one window, `K = (b + 1 + f)·w`: the width of an additive bias."""
        return (self.look_backward + 1 + self.look_forward) * self.window_size

    @property
    def backward_reach(self) -> int:
        """Positions that a query may look back, `b·w`, from its window (block-local) or itself (exact)."""
        return self.look_backward * self.window_size

    @property
    def forward_reach(self) -> int:
        """Positions that a query may look ahead, `f·w`, from its window (block-local) or itself (exact)."""
        return self.look_forward * self.window_size

    def visible_interval(self, query: IntArray, length: int) -> tuple[IntArray, IntArray]:
        """Return the first visible key and one past the last, for positions `query` among `length` keys."""
        import numpy as np

        query = np.asarray(query, dtype=np.int64)
        window_start = query - query % self.window_size
        if self.exact_windowsize:
            first = query - self.backward_reach
            end = query + self.forward_reach + 1
        else:
            first = window_start - self.backward_reach
            end = window_start + self.window_size + self.forward_reach
        if self.causal:
            end = query + 1
        return np.clip(first, 0, length), np.clip(end, 0, length)

    def visibility(self, query: IntArray, key: IntArray, length: int) -> NDArray[np.bool_]:
        """Return which positions `key` each of the positions `query` sees, `[len(query), len(key)]`."""
        import numpy as np

        first, end = self.visible_interval(query, length)
        key = np.asarray(key, dtype=np.int64)[None, :]
        return (first[:, None] <= key) & (key < end[:, None])

    def receptive_interval(self, query: int, length: int, depth: int = 1) -> tuple[int, int]:
        """Return what a query sees through `depth` stacked layers of this geometry: `[lo, hi)`.

        The ends of the interval are monotone in the query, so each layer extends the interval by the
        reach of its own two ends.
        """
        import numpy as np

        low, high = query, query + 1
        for _ in range(depth):
            first, end = self.visible_interval(np.array([low, high - 1]), length)
            low, high = int(first[0]), int(end[1])
        return low, high

    def mean_visible_keys(self, length: int) -> float:
        """Return the mean number of visible keys per query, the `K` of the operation count `4·b·h·n·d·K`."""
        import numpy as np

        first, end = self.visible_interval(np.arange(length), length)
        return float((end - first).mean())

    def describe(self) -> str:
        """Describe the window in words, for reports."""
        if self.sees_all:
            return f"{'causal' if self.causal else 'non-causal'}, all keys"
        kind = "exact" if self.exact_windowsize else "block-local"
        direction = "causal" if self.causal else "non-causal"
        return f"{direction} {kind}, window {self.window_size}, {self.look_backward} back, {self.look_forward} forward"
