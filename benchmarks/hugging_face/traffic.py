"""What a token has to read, and how fast this machine reads: together the time that a token takes at the least."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np

from localattn.core.documents.sidecar import read_sidecar
from localattn.onnx_graph.onnx_file import OnnxFile

from ..limit.program import program

# Elements of each of the four arrays of a pass: 1 GiB together, far beyond any cache.
_ELEMENTS = 2**26
_PASSES = 5
# Operators that read some rows of a table.
_ROWS = ("Gather", "GatherBlockQuantized")


def bytes_of_token(path: Path, context: int) -> int:
    """Return the bytes of weights and caches that a step file reads for the token after so many others.

    Tables of which a token reads a row are left out, unless a product reads them too.
    """
    from onnx import TensorProto, helper

    graph = OnnxFile.read(path).parse().graph
    readers = defaultdict(set)
    for node in graph.node:
        for name in node.input:
            readers[name].add(node.op_type)
    total = 0.0
    for tensor in graph.initializer:
        if readers[tensor.name] - set(_ROWS):
            bits = 4 if tensor.data_type in (TensorProto.INT4, TensorProto.UINT4) else None
            width = bits / 8 if bits else helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            total += math.prod(tensor.dims) * width
    sidecar = read_sidecar(path)
    assert sidecar is not None and sidecar.step is not None
    for cached in sidecar.step.caches:
        batch, heads, slots, *rest = cached.shape
        total += batch * heads * min(slots, context) * math.prod(rest) * np.dtype(cached.dtype).itemsize
    return round(total)


@cache
def read_rate(threads: int) -> float:
    """Measure the GB/s of one pass that reads three arrays and writes one; the best of some, as bytes of all four."""
    arrays = [np.full(_ELEMENTS, 1, np.float32) for _ in range(4)]  # zeros would be one shared page
    best = math.inf
    for _ in range(_PASSES):
        began = time.perf_counter()
        program().pass_over(arrays, 1, threads)
        best = min(best, time.perf_counter() - began)
    return round(sum(x.nbytes for x in arrays) / best / 1e9, 1)
