"""Arrays in GPU memory: those that a session gives, and those of other libraries that it takes.

Both ways go through DLPack or `__cuda_array_interface__`, which PyTorch, CuPy, JAX and Numba have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import dlpack
from .memory import Buffer, download, empty, readable


class UnusableArray(Exception):
    """An array of another library cannot be used; the text says why."""


class GpuArray:
    """A contiguous array in GPU memory, whose values are there already.

    `torch.from_dlpack(array)` and `cupy.asarray(array)` share its memory. The session writes its next results there.

    Args:
        buffer: where its values lie.
        shape: of the array.
        dtype: numpy's name of its elements, or "bfloat16".
        device: number of the GPU.
    """

    def __init__(self, buffer: Buffer, shape: tuple[int, ...], dtype: str, device: int) -> None:
        self._buffer = buffer
        self.shape, self.dtype, self.device = shape, dtype, device

    @property
    def address(self) -> int:
        """Where the first element is."""
        return self._buffer.address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype == "bfloat16":
            raise AttributeError("__cuda_array_interface__ has no bfloat16; DLPack has")
        kind = np.dtype(self.dtype).str
        return {"shape": self.shape, "typestr": kind, "data": (self.address, False), "version": 3, "stream": None}

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.device

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule; `stream` may be any, because nothing is still being computed."""
        device = self.__dlpack_device__()
        if copy or dl_device not in (None, device):
            raise BufferError("the array is shared where it is; copy it with your own library")
        return dlpack.give(self._buffer, self.address, self.shape, self.dtype, device)

    def numpy(self) -> NDArray[Any]:
        """Return a copy in the processor's memory; bfloat16 as fp32."""
        from polygraphy import cuda

        values = empty(self.shape, self.dtype)
        stream = cuda.Stream()
        try:
            download(self.address, values, stream.ptr)
            stream.synchronize()
        finally:
            stream.free()
        return readable(values, self.dtype)

    def __repr__(self) -> str:
        return f"GpuArray({self.dtype} {list(self.shape)} on cuda:{self.device})"


@dataclass(frozen=True)
class GpuView:
    """An array of another library in GPU memory.

    Args:
        address: of its first element.
        shape: of the array.
        dtype: numpy's name of its elements, or "bfloat16".
        keep: holds the memory.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    keep: Any

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return nbytes(self.shape, self.dtype)


def nbytes(shape: Sequence[int], dtype: str) -> int:
    """Return the size of a contiguous array in bytes."""
    return prod(shape) * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)


def view_of(array: Any, stream: int, device: int) -> GpuView:
    """Look at an array of another library; the stream waits for whatever still writes it.

    Args:
        array: has DLPack's methods or `__cuda_array_interface__`.
        stream: address of the stream that will read it.
        device: number of the GPU it must be on.

    Raises:
        UnusableArray: it has neither, lies elsewhere, or is not contiguous.
    """
    try:
        if hasattr(array, "__dlpack_device__"):
            kind, number = (int(part) for part in array.__dlpack_device__())
            if kind not in (dlpack.CUDA, dlpack.CUDA_MANAGED) or number != device:
                raise UnusableArray(f"it lies on DLPack's device {kind}:{number}, not on cuda:{device}")
            capsule = array.__dlpack__(stream=stream)
            found = dlpack.take(capsule)
            keep: Any = (array, capsule)
        elif hasattr(array, "__cuda_array_interface__"):
            found = _by_interface(array.__cuda_array_interface__)
            keep = array
        else:
            raise UnusableArray(
                f"a {type(array).__name__} is no array: it has neither DLPack nor __cuda_array_interface__"
            )
    except (ValueError, TypeError, KeyError, BufferError, RuntimeError) as error:
        # The errors of other libraries: older releases of PyTorch raise RuntimeError for an array with a gradient.
        raise UnusableArray(f"its {type(array).__name__} cannot be shared: {error}") from error
    if not found.is_contiguous:
        raise UnusableArray("it is not contiguous")
    return GpuView(found.address, found.shape, found.dtype, keep)


def _by_interface(interface: Any) -> dlpack.Found:
    """Read `__cuda_array_interface__`, and wait for the stream it names."""
    from polygraphy import cuda

    shape = tuple(int(size) for size in interface["shape"])
    kind = np.dtype(interface["typestr"])
    if not kind.isnative:
        raise ValueError(f"its elements are {interface['typestr']}")
    strides = interface.get("strides")
    contiguous = strides is None or dlpack.are_contiguous(strides, shape, kind.itemsize)
    writer = interface.get("stream")
    if writer is not None:
        cuda.wrapper().stream_synchronize(writer)
    return dlpack.Found(int(interface["data"][0]), shape, kind.name, contiguous)
