"""The cases measured on a GPU, and what they cost at least: the roofline."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import SEQUENCE_FIRST, NodeAttributes

HEADS = 8
LENGTHS = (1024, 4096, 16384, 32768, 65536)
WINDOWS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Case:
    """One size of windowed attention: batch 1, query, key and value `[1, length, HEADS, head_dim]`."""

    causal: bool
    exact: bool
    window: int
    length: int
    head_dim: int
    dtype: str

    @property
    def geometry(self) -> WindowGeometry:
        """One window back and, if not causal, one ahead."""
        return WindowGeometry(self.window, 1, 0 if self.causal else 1, self.causal, self.exact)

    @property
    def attributes(self) -> NodeAttributes:
        """The node, in the layout the exporter writes."""
        return NodeAttributes(self.geometry, self.head_dim**-0.5, perm=SEQUENCE_FIRST)

    def describe(self) -> str:
        """For tables and progress."""
        return f"{self.geometry.describe()}, n {self.length}, d {self.head_dim}, {self.dtype}"

    def as_json(self) -> dict[str, Any]:
        """As results store it."""
        return asdict(self)


def cases(quick: bool) -> list[Case]:
    """All of the grid, or one window and head size of it; windows fit into the sequence twice.

    What tells most comes first, because time on a GPU may end before the grid does: fp16 before bf16, heads of 64
    before 128, the middle window before the others, long sequences before short ones.
    """
    windows, head_dims = ((256,), (64,)) if quick else (WINDOWS, (64, 128))
    lengths, dtypes = ((4096, 32768), ("fp16",)) if quick else (LENGTHS, ("fp16", "bf16"))
    grid = product((True, False), (True, False), windows, lengths, head_dims, dtypes)
    found = [case for case in (Case(*values) for values in grid) if case.length >= 2 * case.window]
    return sorted(found, key=lambda c: (c.dtype != "fp16", c.head_dim, c.window != 256, c.window, -c.length))


@dataclass(frozen=True)
class Device:
    """What a GPU can do at best.

    Args:
        bandwidth: bytes a second from its memory.
        matrix_rate: operations a second of 16-bit matrix products summed in fp32, dense.
        exponentials: exponentials a second.
        source: where the numbers come from.
    """

    bandwidth: float
    matrix_rate: float
    exponentials: float
    source: str


# From the makers' data sheets: name contains → bytes a second, dense fp16 operations a second.
DATA_SHEETS = {
    "H200": (4.8e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100": (3.35e12, 989e12),
    "A100-SXM4-80GB": (2.039e12, 312e12),
    "A100 80GB PCIe": (1.935e12, 312e12),
    "A100": (1.555e12, 312e12),
    "RTX 4090": (1.008e12, 165.2e12),
    "RTX 3090": (0.936e12, 71e12),
    "Orin": (0.2048e12, 42.5e12),
}
# A multiprocessor's special function units give so many results a clock.
_EXPONENTIALS_PER_CLOCK = 16


def data_sheet(name: str, multiprocessors: int, clock_hz: float) -> Device | None:
    """What the maker says of a GPU of this name, or None."""
    for known, (bandwidth, rate) in DATA_SHEETS.items():
        if known in name:
            return Device(bandwidth, rate, _EXPONENTIALS_PER_CLOCK * multiprocessors * clock_hz, "data sheet")
    return None


@dataclass(frozen=True)
class Work:
    """What a case needs at least.

    Args:
        operations: of its two matrix products, `4·b·h·n·d·K`.
        bytes: read and written once, `8·b·h·n·d` for 2-byte elements.
        exponentials: `b·h·n·K`.
    """

    operations: float
    bytes: float
    exponentials: float


def work(case: Case) -> Work:
    """`K` is the mean number of visible keys."""
    rows = HEADS * case.length
    keys = case.geometry.mean_visible_keys(case.length)
    return Work(4 * rows * case.head_dim * keys, 4 * 2 * rows * case.head_dim, rows * keys)


def floor_seconds(needed: Work, device: Device) -> tuple[float, str]:
    """The least time that a device needs for this work, and what takes it."""
    limits = {
        "memory": needed.bytes / device.bandwidth,
        "matrix products": needed.operations / device.matrix_rate,
        "exponentials": needed.exponentials / device.exponentials,
    }
    limit = max(limits, key=lambda name: limits[name])
    return limits[limit], limit
