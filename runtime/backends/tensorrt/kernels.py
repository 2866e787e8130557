"""Tell which compiled kernels a plugin library has loaded in this process: machine code of the GPU, or PTX.

The library tells it itself, by functions that it exports besides TensorRT's (`plugins/library/source/report.h`).
Libraries of earlier releases have none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from ....core.documents.engine_sidecar import KernelName

RING_KERNELS = ("step", "chunk", "join")
# As `Element` of the library numbers them.
ELEMENTS = {"fp16": 0, "bf16": 1, "fp32": 2, "fp8": 3}
_ROOM = 1 << 16  # bytes; a line has some hundred


def loaded_kernels(library: ctypes.CDLL) -> tuple[str, ...]:
    """Return a line for each kernel that the library has loaded so far: "fp16, head size 64: machine code of sm_87"."""
    if not hasattr(library, "localattn_loaded_kernels"):
        return ()
    text = ctypes.create_string_buffer(_ROOM)
    library.localattn_loaded_kernels(text, ctypes.c_size_t(_ROOM))
    return tuple(text.value.decode("utf-8", "replace").splitlines())


def load_kernels(library: ctypes.CDLL, kernels: Iterable[KernelName]) -> tuple[str, ...]:
    """Load kernels into the current CUDA context; return a line for each, which says what was loaded or why not."""
    if not hasattr(library, "localattn_load_kernel_with"):
        return ()
    lines = []
    for kernel in kernels:
        text = ctypes.create_string_buffer(_ROOM)
        element = ELEMENTS.get(kernel.dtype, -1)
        bits = _bits(kernel)
        failed = library.localattn_load_kernel_with(element, kernel.head_dim, bits, text, ctypes.c_size_t(_ROOM))
        line = text.value.decode("utf-8", "replace")
        lines.append(f"not loaded: {line}" if failed else line)
    return tuple(lines)


def _bits(kernel: KernelName) -> int:
    """Return the options of a kernel as the library reads them, one bit each."""
    lowest_first = (
        kernel.has_mask,
        kernel.has_bias,
        kernel.has_xpos,
        kernel.has_softcap,
        kernel.has_sinks,
        kernel.has_shared_qk,
        kernel.node == "gated_mean",
        kernel.causal,
        kernel.node in RING_KERNELS,
        kernel.node == "chunk",
        kernel.node == "join",
    )
    return sum(1 << bit for bit, is_set in enumerate(lowest_first) if is_set)
