"""Run one file, or the model in PyTorch, at one length in this process, and print processor seconds and peak memory.

python -m benchmarks.hugging_face.run NAME PATH LENGTH OUTPUT
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..candidates import THREADS
from ..cases.memory import peak_of_process

EAGER, COMPILED = "torch_sdpa", "ours_kernels"
# Calls of which the best counts, after one that does not: a call of a long sequence takes half a minute. Where the
# first one took this many processor seconds, it counts alone.
_CALLS, _CALLS_OF_SHORT, _SHORT, _ONCE = 1, 4, 1024, 60
_LARGEST_TOKEN = 50_000


def inputs(length: int) -> dict[str, np.ndarray[Any, Any]]:
    """One sequence without padding, the same in every process."""
    ids = np.random.default_rng(0).integers(5, _LARGEST_TOKEN, (1, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def in_onnxruntime(path: Path, *, kernels: bool) -> Callable[[dict[str, Any]], Any]:
    """A call of a file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = THREADS, 1, 3
    if kernels:
        from ..cases.compiled import library

        options.register_custom_ops_library(str(library()))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return lambda feed: session.run(None, {name: x for name, x in feed.items() if name in names})[0]


def in_torch(folder: Path) -> Callable[[dict[str, Any]], Any]:
    """A call of the untouched model."""
    import torch
    from transformers import AutoModel

    torch.set_num_threads(THREADS)
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()

    @torch.no_grad()
    def call(feed: dict[str, Any]) -> Any:
        return model(**{name: torch.from_numpy(x) for name, x in feed.items()}).last_hidden_state.numpy()

    return call


def main(name: str, path: str, length: str, output: str) -> dict[str, Any]:
    """Time calls by the processor's clock, on which other processes weigh little."""
    feed = inputs(int(length))
    call = in_torch(Path(path)) if name == EAGER else in_onnxruntime(Path(path), kernels=name == COMPILED)

    def timed() -> tuple[float, float, Any]:
        cpu, began = time.process_time(), time.perf_counter()
        found = call(feed)
        return time.process_time() - cpu, time.perf_counter() - began, found

    calls = [timed()]
    if calls[0][0] < _ONCE:
        calls = [timed() for _ in range(_CALLS_OF_SHORT if int(length) <= _SHORT else _CALLS)]
    seconds, wall, results = zip(*calls, strict=True)
    result = results[0]
    np.save(output, result[:, :: max(1, int(length) // 64)])
    return {"cpu_s": round(min(seconds), 3), "wall_s": round(min(wall), 3), "peak_bytes": peak_of_process()}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
