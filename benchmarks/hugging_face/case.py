"""A Hugging Face model at the size of ModernBERT-base: its file beside those that other exporters make of it.

The weights are random, in the shape of the real model: nothing is fetched, and time does not depend on values. Every
file takes `input_ids` and `attention_mask`, with batch and length open. Each call runs in a process of its own, and
what counts is the processor's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..candidates import THREADS
from ..cases.compiled import why_no_library
from ..target import Target
from .candidates import SCRIPTS, Measurement, made, measured
from .run import COMPILED, EAGER

NAME = "hugging_face"
LENGTHS = (1024, 4096)
LABELS = {
    COMPILED: "localattn, compiled kernels",
    "ours": "localattn",
    "transformers_fused": "transformers' OnnxExporter, fused for CPUs",
    "transformers_onnx": "transformers' OnnxExporter",
    "optimum": "optimum-onnx",
    "torch_onnx": "torch.onnx",
    EAGER: "PyTorch, sdpa",
}
OURS = (COMPILED, "ours")
# At most this share of the fastest peer's time, and of the leanest one's memory.
TIME, MEMORY = {1024: 0.55, 4096: 0.3}, {4096: 0.5}


def measure(
    folder: Path,
    lengths: Sequence[int],
    only: Sequence[str],
    tell: Callable[[str], None],
    keep: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Measure at lengths in tokens, and return the whole document; `folder` keeps the model and the files.

    See `Measurement.measure` for the rest.
    """
    model = _model(folder)

    def file(name: str) -> Path | dict[str, str]:
        if name == EAGER:
            return model
        if name == COMPILED and (reason := why_no_library()):
            return {"skipped": reason}
        maker = "ours" if name == COMPILED else name
        path = folder / maker / "model.onnx"
        return made(path, [SCRIPTS / "make.py", maker, model, path], optimum=maker == "optimum")

    def run(name: str, path: Path, length: int) -> dict[str, Any]:
        words = ["-m", "benchmarks.hugging_face.run", name, path, length]
        return measured(words, folder / f"{name}-{length}.npy", folder / f"{OURS[1]}-{length}.npy", "outputs")

    facts = {"model": "ModernBERT-base's shape, random weights", "threads": THREADS, "labels": LABELS}
    return Measurement(NAME, "length", facts, targets, file, run).measure(lengths, only, tell, keep)


def targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """What is asked of the better of our two ways, at each length."""
    found = []
    for row in rows:
        for figure, limits, what in (("cpu_s", TIME, "processor time"), ("peak_mib", MEMORY, "memory")):
            own = [x[figure] for name, x in row["candidates"].items() if name in OURS and figure in x]
            peers = [x[figure] for name, x in row["candidates"].items() if name not in OURS and figure in x]
            if own and peers and row["length"] in limits:
                text = f"{what} at {row['length']} / the best peer's"
                found.append(Target(text, min(own) / min(peers), limits[row["length"]]))
    return found


def _model(folder: Path) -> Path:
    """The model, made once."""
    path = folder / "base"
    if not (path / "config.json").exists():
        import torch
        import transformers

        torch.manual_seed(0)
        transformers.ModernBertModel(transformers.ModernBertConfig()).save_pretrained(path)
    return path
