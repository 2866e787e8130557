"""The two loops of `source/limit.cpp`: compiled once for a run of the benchmarks, called without Python's lock."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localattn.core.machine.processor import host_arch
from localattn.plugins.compilers import find_compiler
from localattn.plugins.shared_library import compile_library

_NAME = "liblocalattn_limit.so"
_SOURCE = Path(__file__).parent / "source"


class Program:
    """The loops, for one instruction set.

    Args:
        library: compiled from `source/`.
        instruction_set: "avx512", "avx2", "neon" or "baseline", as the kernels name it.
    """

    def __init__(self, library: Path, instruction_set: str) -> None:
        loaded = ctypes.CDLL(str(library))
        self._set = instruction_set.encode()
        self._multiply_add, self._pass = loaded.localattn_multiply_add, loaded.localattn_pass
        self._multiply_add.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int)
        self._multiply_add.restype = ctypes.c_double
        self._pass.argtypes = (ctypes.c_char_p, *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 2, ctypes.c_int)

    def multiply_add(self, rounds: int, threads: int) -> float:
        """Run the multiply-adds; return how many operations that were, a multiplication and an addition each.

        Raises:
            ValueError: the loops know no such instruction set.
        """
        operations = float(self._multiply_add(self._set, rounds, threads))
        if not operations:
            raise ValueError(f"no loops for the instruction set {self._set.decode()}")
        return operations

    def pass_over(self, arrays: Sequence[NDArray[Any]], times: int, threads: int) -> None:
        """Write the sum of the first three arrays, all fp32 of one size, into the fourth, so many times.

        Raises:
            ValueError: the loops know no such instruction set, or the arrays do not fit together.
        """
        a, b, c, to = arrays
        if any(x.dtype != np.float32 or x.shape != to.shape or not x.flags.c_contiguous for x in arrays):
            raise ValueError("the arrays are of different shapes, or not contiguous fp32")
        if not self._pass(self._set, *(x.ctypes.data for x in (a, b, c, to)), to.size, times, threads):
            raise ValueError(f"no loops for the instruction set {self._set.decode()}")


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Gone with this process."""
    return tempfile.TemporaryDirectory(prefix="localattn-benchmarks-")


@cache
def build() -> Path:
    """The compiled loops.

    Raises:
        MissingDependency: there is no C++ compiler.
        BuildFailed: it failed.
    """
    compiler = find_compiler(host_arch())
    path = Path(_folder().name) / _NAME
    options = ("-O3", "-pthread")
    compile_library(_SOURCE, compiler, path, name=_NAME, options=options, fix=f"{compiler.version}.")
    return path


@cache
def instruction_set() -> str:
    """The instruction set that the compiled kernels use here.

    Raises:
        NoKernel: there are none.
    """
    from ..cases.compiled import library

    ask = ctypes.CDLL(str(library())).localattn_instruction_set
    ask.restype = ctypes.c_char_p
    return str(ask().decode("ascii"))


def program() -> Program:
    """The loops for the instruction set that the kernels use.

    Raises:
        NoKernel: there is no kernel to ask, as without a C++ compiler.
    """
    return Program(build(), instruction_set())
