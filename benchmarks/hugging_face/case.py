"""A Hugging Face model at the size of ModernBERT-base: its file beside those that other exporters make of it.

The weights are random, in the shape of the real model: nothing is fetched, and time does not depend on values. Every
file takes `input_ids` and `attention_mask`, with batch and length open. Each call runs in a process of its own, and
what counts is the processor's time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..candidates import THREADS
from ..cases.compiled import why_no_library
from ..machine import ROOT, own_result
from ..target import Target
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
# optimum-onnx takes an older transformers: the interpreter of its environment.
OPTIMUM = "LOCALATTN_BENCHMARKS_OPTIMUM"
# At most this share of the fastest peer's time, and of the leanest one's memory.
TIME, MEMORY = {1024: 0.55, 4096: 0.3}, {4096: 0.5}
# Files of one model differ by rounding alone; hidden states are about 1.
AGREEMENT = 1e-3


def measure(
    folder: Path,
    lengths: Sequence[int],
    only: Sequence[str],
    tell: Callable[[str], None],
    keep: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Measure, beside what `results/` has already, and return the whole document.

    Args:
        folder: keeps the model and the files from call to call.
        lengths: tokens.
        only: candidates; the others keep their figures. Empty: all.
        tell: told each step.
        keep: given the document after each candidate: a long sequence takes minutes.
    """
    known = (own_result(NAME) or {"sizes": []})["sizes"] if only else []
    sizes = {size["length"]: size["candidates"] for size in known}
    wanted = [name for name in LABELS if not only or name in only]
    if COMPILED in wanted and (reason := why_no_library()):
        tell(f"No compiled kernels: {reason}")
        wanted.remove(COMPILED)
    model = _model(folder)
    for name in wanted:
        path = model if name == EAGER else _file(name, model, folder, tell)
        for length in lengths:
            entry = sizes.setdefault(length, {})
            entry[name] = path if isinstance(path, dict) else _run(name, path, length, folder)
            tell(f"{length}: {LABELS[name]}: {entry[name]}")
            keep(_document(sizes))
    return _document(sizes)


def _document(sizes: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    rows = [{"length": length, "candidates": sizes[length]} for length in sorted(sizes)]
    return {
        "model": "ModernBERT-base's shape, random weights",
        "threads": THREADS,
        "labels": LABELS,
        "sizes": rows,
        "targets": [target.to_dict() for target in targets(rows)],
    }


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


def _file(name: str, model: Path, folder: Path, tell: Callable[[str], None]) -> Path | dict[str, str]:
    """The file of an exporter, made once; or why there is none."""
    maker = "ours" if name == COMPILED else name
    path = folder / maker / "model.onnx"
    if path.exists():
        return path
    tell(f"Exporting: {LABELS[name]}")
    path.parent.mkdir(exist_ok=True)
    python, environment = sys.executable, dict(os.environ)
    if maker == "optimum":
        if OPTIMUM not in os.environ:
            return {"skipped": f"{OPTIMUM} names no interpreter"}
        python, environment = os.environ[OPTIMUM], {**os.environ, "PYTHONPATH": ""}
    script = ROOT / "benchmarks" / "hugging_face" / "make.py"
    done = subprocess.run([python, script, maker, model, path], env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return path


def _run(name: str, path: Path, length: int, folder: Path) -> dict[str, Any]:
    """Seconds and memory of a candidate, and how far its outputs are from those of our file, if they are known."""
    output = folder / f"{name}-{length}.npy"
    words = ["-m", "benchmarks.hugging_face.run", name, str(path), str(length), str(output)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1][:200]}
    found = json.loads(done.stdout.splitlines()[-1])
    entry = {"cpu_s": found["cpu_s"], "wall_s": found["wall_s"], "peak_mib": round(found["peak_bytes"] / 2**20)}
    expected = folder / f"{OURS[1]}-{length}.npy"
    if expected.exists():
        differs = float(np.abs(np.load(output) - np.load(expected)).max())
        entry["differs_by"] = float(f"{differs:.2g}")
        if differs > AGREEMENT:
            entry["failed"] = f"its outputs differ by {differs:.2g}"
    return entry
