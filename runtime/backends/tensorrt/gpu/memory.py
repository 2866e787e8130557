"""GPU memory that is freed when nobody holds it any more, and copies in the order of a stream."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What TensorRT demands of the address of every input and output, in bytes; cudaMalloc gives no other.
ALIGNMENT = 256


class Buffer:
    """Bytes of GPU memory on the current device.

    Attributes:
        address: where they begin, a multiple of `ALIGNMENT`.
        size: how many; at least one, because TensorRT takes no null address for an empty tensor.

    Raises:
        PolygraphyException: there is not enough memory.
    """

    def __init__(self, size: int) -> None:
        from polygraphy import cuda

        self.size = max(1, size)
        self.address: int = cuda.wrapper().malloc(self.size)
        # The end of the process frees it too, and CUDA may be gone by then.
        weakref.finalize(self, cuda.wrapper().free, self.address).atexit = False


def upload(array: NDArray[Any], address: int, stream: int) -> None:
    """Copy a contiguous array to the GPU; it must live until the stream is synchronised."""
    from polygraphy import cuda

    cuda.wrapper().memcpy(address, array.ctypes.data, array.nbytes, cuda.MemcpyKind.HostToDevice, stream)


def download(address: int, array: NDArray[Any], stream: int) -> None:
    """Copy from the GPU into a contiguous array; it holds the values once the stream is synchronised."""
    from polygraphy import cuda

    cuda.wrapper().memcpy(array.ctypes.data, address, array.nbytes, cuda.MemcpyKind.DeviceToHost, stream)


def copy(source: int, target: int, size: int, stream: int) -> None:
    """Copy bytes within the GPU."""
    from polygraphy import cuda

    cuda.wrapper().memcpy(target, source, size, cuda.MemcpyKind.DeviceToDevice, stream)


def empty(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return an array for values from the GPU; numpy has no bfloat16, so their bits are 16-bit integers."""
    return np.empty(shape, np.uint16 if dtype == "bfloat16" else dtype)


def readable(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return what `empty` gave in numbers: bfloat16 as fp32, which holds each exactly."""
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array
