"""Compiled kernels through the CUDA driver alone, as the plugins launch them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localattn.core.errors import MissingDependency
from localattn.plugins.kernel.compile import CompiledKernel
from localattn.plugins.kernel.spec import grid

LIBRARIES = ("libcuda.so.1", "nvcuda.dll")


@dataclass
class Arguments:
    """The `kernelParams` of cuLaunchKernel: addresses of the values, which live as long as this does."""

    values: list[Any]
    pointers: Any

    @classmethod
    def pack(cls, inputs: Sequence[int], scalars: Sequence[int], output: int) -> Arguments:
        """In the kernel's order: addresses of the inputs, int32 scalars, address of the output."""
        values = [
            *(ctypes.c_void_p(address) for address in inputs),
            *(ctypes.c_int32(scalar) for scalar in scalars),
            ctypes.c_void_p(output),
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        return cls(values, pointers)


class Driver:
    """The CUDA driver of this machine; works in the context that PyTorch has made current.

    Raises:
        MissingDependency: there is no driver.
    """

    def __init__(self) -> None:
        self.library = _open()
        self.library.cuLaunchKernel.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            *[ctypes.c_void_p] * 3,
        ]

    def check(self, status: int, what: str) -> None:
        """Raise what the driver says."""
        if status:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")

    def load(self, image: bytes, entry: str) -> ctypes.c_void_p:
        """A kernel of a cubin or of a PTX text."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.library.cuModuleLoadData(ctypes.byref(module), image + b"\0"), "cuModuleLoadData")
        self.check(
            self.library.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), "cuModuleGetFunction"
        )
        return function

    def launch(
        self, function: ctypes.c_void_p, kernel: CompiledKernel, arguments: Arguments, length: int, batch_heads: int,
        stream: int,
    ) -> None:  # fmt: skip
        """Start a kernel; returns at once."""
        blocks = grid(kernel.tile, length, batch_heads)
        status = self.library.cuLaunchKernel(
            function, *blocks, kernel.threads, 1, 1, kernel.shared_bytes, stream, arguments.pointers, None
        )
        self.check(status, "cuLaunchKernel")


def _open() -> Any:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MissingDependency(
        "There is no NVIDIA driver on this machine.",
        why=f"None of {', '.join(LIBRARIES)} could be opened.",
        fix="Run this where an NVIDIA GPU and its driver are.",
    )
