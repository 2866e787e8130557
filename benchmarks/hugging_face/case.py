"""A Hugging Face model at the size of one that people deploy: its file beside those that other exporters make of it.

The weights are random, in the shape of the real model: nothing is fetched, and time does not depend on values. Every
file takes `input_ids` and `attention_mask`, with batch and length open, and gives hidden states. Each call runs in a
process of its own, and what counts is the processor's time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..candidates import THREADS
from ..cases.compiled import why_no_library
from ..target import Target
from .candidates import OPTIMUM, SCRIPTS, Measurement, made, measured
from .decoder import GEMMA_3_270M
from .run import COMPILED, EAGER

LABELS = {
    COMPILED: "localattn, compiled kernels",
    "ours": "localattn",
    "transformers_fused": "OnnxExporter, fused",
    "transformers_onnx": "OnnxExporter",
    "optimum": "optimum-onnx",
    "torch_onnx": "torch.onnx",
    EAGER: "PyTorch, sdpa",
}
OURS = (COMPILED, "ours")


class Model(NamedTuple):
    """A model that is measured.

    Args:
        label: what it has the shape of.
        result: name of the result.
        config, kind: its classes in transformers.
        values: of the configuration, where they are not its defaults.
        lengths: in tokens.
        time: at most this share of the fastest peer's processor time, by length.
        memory: at most this share of the leanest peer's memory, by length.
    """

    label: str
    result: str
    config: str
    kind: str
    values: Mapping[str, Any]
    lengths: tuple[int, ...]
    time: Mapping[int, float]
    memory: Mapping[int, float]


MODELS = {
    "modernbert-base": Model(
        "ModernBERT-base",
        "hugging_face",
        "ModernBertConfig",
        "ModernBertModel",
        {},
        (1024, 4096, 8192),
        {1024: 0.55, 4096: 0.3, 8192: 0.25},
        {4096: 0.5},
    ),
    # Logits of 8,192 tokens would take 8.6 GB in every candidate.
    "gemma-3-270m": Model(
        "Gemma-3-270m",
        "hugging_face_gemma",
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {**GEMMA_3_270M, "use_cache": False},
        (8192,),
        {8192: 0.5},
        {},
    ),
}


def measure(
    model: Model,
    folder: Path,
    lengths: Sequence[int],
    only: Sequence[str],
    tell: Callable[[str], None],
    keep: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Measure at lengths in tokens, and return the whole document; `folder` keeps the model and the files.

    See `Measurement.measure` for the rest.
    """
    made_model = _made(model, folder)

    def file(name: str, _length: int) -> Path | dict[str, str]:
        if name == EAGER:
            return made_model
        if name == COMPILED and (reason := why_no_library()):
            return {"skipped": reason}
        maker = "ours" if name == COMPILED else name
        path = folder / maker / "model.onnx"
        elsewhere = OPTIMUM if maker == "optimum" else None
        return made(path, [SCRIPTS / "make.py", maker, made_model, path], elsewhere=elsewhere)

    def run(name: str, path: Path, length: int) -> dict[str, Any]:
        words = ["-m", "benchmarks.hugging_face.run", name, path, length]
        return measured(words, folder / f"{name}-{length}.npy", folder / f"{OURS[1]}-{length}.npy", "outputs")

    header = {"model": f"{model.label}'s shape, random weights", "threads": THREADS, "labels": LABELS}
    asked = partial(targets, model)
    return Measurement(model.result, "length", header, asked, file, run).measure(lengths, only, tell, keep)


def targets(model: Model, rows: Sequence[dict[str, Any]]) -> list[Target]:
    """What is asked of the better of our two ways, at each length."""
    found = []
    for row in rows:
        for figure, limits, what in (("cpu_s", model.time, "processor time"), ("peak_mib", model.memory, "memory")):
            own = [x[figure] for name, x in row["candidates"].items() if name in OURS and figure in x]
            peers = [x[figure] for name, x in row["candidates"].items() if name not in OURS and figure in x]
            if own and peers and row["length"] in limits:
                text = f"{what} at {row['length']} / the best peer's"
                found.append(Target(text, min(own) / min(peers), limits[row["length"]]))
    return found


def _made(model: Model, folder: Path) -> Path:
    """The model, made once."""
    path = folder / "base"
    if not (path / "config.json").exists():
        import torch
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, model.config)(**model.values)
        getattr(transformers, model.kind)(config).save_pretrained(path)
    return path
