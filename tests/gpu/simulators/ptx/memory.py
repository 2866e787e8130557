"""Memory whose every access is checked: bounds, alignment, and whether something was written there."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
import numpy.typing as npt

from .program import PtxFault

Array = npt.NDArray[Any]
# Tensors start where the CUDA allocator would put them, far from each other.
_FIRST_ADDRESS, _GAP = 0x7F00_0000_0000, 1 << 32
# Where dynamic shared memory starts: not 0, so that a forgotten base is noticed. Swizzles count in units of 1024.
SHARED_BASE = 1024


class GlobalMemory:
    """Arrays at addresses, as a kernel's pointers name them."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._arrays: list[Array] = []

    def put(self, array: Array, address: int | None = None) -> int:
        """Map a contiguous array; returns its address. It is read and written in place."""
        if not array.flags.c_contiguous:
            raise ValueError("only contiguous arrays are memory")
        address = _FIRST_ADDRESS + len(self._starts) * _GAP if address is None else address
        place = bisect_right(self._starts, address)
        self._starts.insert(place, address)
        self._arrays.insert(place, array.reshape(-1).view(np.uint8))
        return address

    def load(self, addresses: Array, size: int) -> Array:
        """Numbers of `size` bytes, unsigned, at each of the addresses."""
        values = np.zeros(len(addresses), f"u{size}")
        for array, offsets, where in self._places(addresses, size):
            values[where] = _view(array, size)[offsets // size]
        return values

    def store(self, addresses: Array, values: Array) -> None:
        """Write unsigned numbers."""
        size = values.dtype.itemsize
        for array, offsets, where in self._places(addresses, size):
            _view(array, size)[offsets // size] = values[where]

    def _places(self, addresses: Array, size: int) -> list[tuple[Array, Array, Array]]:
        places = []
        owner = np.searchsorted(np.array(self._starts, np.uint64), addresses, side="right").astype(int) - 1
        for index in np.unique(owner):
            where = owner == index
            offsets = (addresses[where] - np.uint64(self._starts[max(index, 0)])).astype(np.int64)
            if index < 0 or (offsets + size > len(self._arrays[index])).any():
                raise PtxFault(f"global memory: {int(addresses[where].max()):#x} is in no tensor")
            if (offsets % size).any():
                raise PtxFault(f"global memory: {size} bytes at an address that is no multiple")
            places.append((self._arrays[index], offsets, where))
        return places


def _view(array: Array, size: int) -> Array:
    return array[: len(array) // size * size].view(f"u{size}")


class SharedMemory:
    """The shared memory of some blocks.

    Besides the bytes it keeps, of every `unit` of them, who wrote and read them since the last barrier: what nothing
    wrote cannot be read, nor can what another warp wrote since; and what another warp read cannot be overwritten.
    """

    def __init__(self, blocks: int, size: int, unit: int = 2) -> None:
        self.size, self.unit = size, unit
        self._bytes = np.zeros((blocks, size + -size % 16), np.uint8)
        units = self._bytes.shape[1] // self.unit
        self._valid = np.zeros((blocks, units), bool)
        self._writer = np.full((blocks, units), -1, np.int16)
        self._reader = np.full((blocks, units), -1, np.int16)

    def barrier(self) -> None:
        """All threads of each block have met."""
        self._writer[...] = -1
        self._reader[...] = -1

    def load(self, block: Array, address: Array, size: int, warp: Array) -> Array:
        """Numbers of `size` bytes, unsigned.

        Args:
            block: of each access.
            address: of each access, in bytes.
            size: bytes.
            warp: that reads.
        """
        offset = self._offset(address, size)
        unit = (offset[:, None] + np.arange(0, size, self.unit)) // self.unit
        rows, warps = block[:, None], warp[:, None]
        if not self._valid[rows, unit].all():
            raise PtxFault("shared memory: read before anything was written there, or before a copy was waited for")
        self._forbid(self._writer[rows, unit], warps, "read", "wrote")
        before = self._reader[rows, unit]
        self._reader[rows, unit] = np.where((before == -1) | (before == warps), warps, np.int16(-2))
        return self._bytes.view(f"u{size}")[block, offset // size]

    def store(self, block: Array, address: Array, values: Array, warp: Array) -> None:
        """Write unsigned numbers; arguments as of `load`."""
        size = values.dtype.itemsize
        offset = self._offset(address, size)
        unit = (offset[:, None] + np.arange(0, max(size, self.unit), self.unit)) // self.unit
        rows, warps = block[:, None], warp[:, None]
        self._forbid(self._writer[rows, unit], warps, "written", "wrote")
        self._forbid(self._reader[rows, unit], warps, "written", "read")
        self._bytes.view(f"u{size}")[block, offset // size] = values
        self._valid[rows, unit] = True
        self._writer[rows, unit] = warps

    def promise(self, block: Array, address: Array, size: int, warp: Array) -> None:
        """A copy has started: until it arrives, its bytes are nobody's to read."""
        offset = self._offset(address, size)
        unit = (offset[:, None] + np.arange(0, size, self.unit)) // self.unit
        self._forbid(self._reader[block[:, None], unit], warp[:, None], "copied over", "read")
        self._valid[block[:, None], unit] = False

    def _offset(self, address: Array, size: int) -> Array:
        offset = address.astype(np.int64) - SHARED_BASE
        if (offset < 0).any() or (offset + size > self.size).any():
            raise PtxFault(f"shared memory: an access outside of its {self.size} bytes")
        if (offset % size).any():
            raise PtxFault(f"shared memory: {size} bytes at an address that is no multiple")
        return offset

    @staticmethod
    def _forbid(others: Array, warps: Array, doing: str, did: str) -> None:
        if ((others != -1) & (others != warps)).any():
            raise PtxFault(f"shared memory: {doing} without a barrier since another warp {did} it")
