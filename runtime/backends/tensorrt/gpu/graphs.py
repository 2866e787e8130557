"""CUDA graphs: record once what a stream is given, and launch it again at the cost of one call.

The functions are those of the CUDA runtime from 11.4 on, called through Polygraphy's handle of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

# cudaStreamCaptureModeThreadLocal: other threads may go on allocating memory.
_THREAD_LOCAL = 1


class NotRecorded(Exception):
    """No graph could be recorded; the text says why."""


class Graph:
    """Work that was recorded and can be launched.

    Args:
        executable: CUDA's `cudaGraphExec_t`.
    """

    def __init__(self, executable: int) -> None:
        self._executable = executable

    def launch(self, stream: int) -> None:
        """Give the work to a stream.

        Raises:
            PolygraphyException: CUDA does not take it.
        """
        from polygraphy import cuda

        wrapper = cuda.wrapper()
        wrapper.check(wrapper.handle.cudaGraphLaunch(ctypes.c_void_p(self._executable), ctypes.c_void_p(stream)))

    def free(self) -> None:
        """Free it, once; it must not be launched any more."""
        from polygraphy import cuda

        cuda.wrapper().handle.cudaGraphExecDestroy(ctypes.c_void_p(self._executable))


def record(stream: int, work: Callable[[], bool]) -> Graph:
    """Record what `work` gives to a stream; nothing of it is computed.

    Args:
        stream: address of the CUDA stream, which must have no recording going on.
        work: gives its work to the stream, and returns False if it could not.

    Raises:
        NotRecorded: the work cannot be recorded, or CUDA makes no graph of it. The stream can be used as before.
    """
    from polygraphy import cuda

    runtime = cuda.wrapper().handle
    _demand(runtime, "cudaStreamBeginCapture", ctypes.c_void_p(stream), ctypes.c_int(_THREAD_LOCAL))
    graph = ctypes.c_void_p()
    try:
        given = work()
    finally:  # else the stream would record for ever
        ended = runtime.cudaStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
    try:
        if not given or ended or not graph.value:
            runtime.cudaGetLastError()
            raise NotRecorded("TensorRT refused the recording." if not given else f"CUDA error {ended} ended it.")
        executable = ctypes.c_void_p()
        flags = ctypes.c_ulonglong(0)
        _demand(runtime, "cudaGraphInstantiateWithFlags", ctypes.byref(executable), graph, flags)
    finally:
        if graph.value:
            runtime.cudaGraphDestroy(graph)
    assert executable.value is not None
    return Graph(executable.value)


def _demand(runtime: Any, function: str, *arguments: Any) -> None:
    if not hasattr(runtime, function):
        raise NotRecorded(f"The CUDA runtime has no {function}.")
    status = getattr(runtime, function)(*arguments)
    if status:
        runtime.cudaGetLastError()  # an error that stays would be found by the next call
        raise NotRecorded(f"{function} returned CUDA error {status}.")
