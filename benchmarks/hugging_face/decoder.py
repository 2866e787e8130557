"""A Hugging Face decoder at the size of Gemma-3-270m, token by token, beside other ways to run its folder.

The weights are random, in the shape of the real model: nothing is fetched, and time does not depend on values. All
candidates take the same prompt and then the likeliest token, each in a process of its own; their tokens and the logits
after the prompt are compared.
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

from ..machine import ROOT, own_result
from ..target import Target
from .case import AGREEMENT, OPTIMUM
from .decoder_run import THREADS

NAME = "decoder"
CONTEXTS = (1024, 8192)
TOKENS = 32
LABELS = {
    "ours": "localattn, compiled kernels",
    "ours_functions": "localattn, functions",
    "ours_int4": "localattn, int4",
    "optimum": "optimum-onnx",
    "pytorch": "PyTorch, transformers' cache",
}
_EXACT = ("ours", "ours_functions")


def measure(
    folder: Path,
    contexts: Sequence[int],
    only: Sequence[str],
    tell: Callable[[str], None],
    keep: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Measure, beside what this processor has already, and return the whole document.

    Args:
        folder: keeps the model and the files from call to call.
        contexts: tokens of the prompt.
        only: candidates; the others keep their figures. Empty: all.
        tell: told each step.
        keep: given the document after each candidate: a long prompt takes minutes.
    """
    known = (own_result(NAME) or {"sizes": []})["sizes"] if only else []
    sizes = {size["context"]: size["candidates"] for size in known}
    model = _model(folder, max(contexts) + 2 * TOKENS)
    for name in (name for name in LABELS if not only or name in only):
        path = model if name == "pytorch" else _file(name, model, folder, max(contexts) + 2 * TOKENS, tell)
        for context in contexts:
            entry = sizes.setdefault(context, {})
            entry[name] = path if isinstance(path, dict) else _run(name, path, context, folder)
            tell(f"{context}: {LABELS[name]}: {entry[name]}")
            keep(_document(sizes))
    return _document(sizes)


def _document(sizes: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    rows = [{"context": context, "candidates": sizes[context]} for context in sorted(sizes)]
    return {
        "model": "Gemma-3-270m's shape, random weights",
        "threads": THREADS,
        "tokens": TOKENS,
        "labels": LABELS,
        "sizes": rows,
        "targets": [target.to_dict() for target in targets(rows)],
    }


def targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """Never slower than the fastest peer, and half of PyTorch's memory, where the numbers are those of fp32."""
    found = []
    for row in rows:
        timed = {name: x for name, x in row["candidates"].items() if "token_ms" in x}
        peers = [x["token_ms"] for name, x in timed.items() if not name.startswith("ours")]
        own = [timed[name]["token_ms"] for name in _EXACT if name in timed]
        if own and peers:
            found.append(Target(f"a token after {row['context']} / the fastest peer's", min(own) / min(peers), 1.0))
        if "ours" in timed and "pytorch" in timed and row["context"] > min(CONTEXTS):
            ratio = timed["ours"]["peak_mib"] / timed["pytorch"]["peak_mib"]
            found.append(Target(f"memory after {row['context']} / PyTorch's", ratio, 0.5))
    return found


def _model(folder: Path, positions: int) -> Path:
    """The model, made once."""
    path = folder / "model"
    if not (path / "config.json").exists():
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.Gemma3TextConfig(
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=18,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            sliding_window=512,
            max_position_embeddings=max(32_768, positions),
        )
        transformers.Gemma3ForCausalLM(config).save_pretrained(path)
    return path


def _file(name: str, model: Path, folder: Path, positions: int, tell: Callable[[str], None]) -> Path | dict[str, str]:
    """The file of an exporter, made once; or why there is none."""
    maker = "ours" if name in _EXACT else name
    path = folder / maker / "model.onnx"
    if path.exists():
        return path
    tell(f"Exporting: {LABELS[name]}")
    path.parent.mkdir(exist_ok=True)
    if maker == "optimum":
        if OPTIMUM not in os.environ:
            return {"skipped": f"{OPTIMUM} names no interpreter"}
        script = ROOT / "benchmarks" / "hugging_face" / "make.py"
        words = [os.environ[OPTIMUM], script, "optimum_decoder", model, path]
        environment = {**os.environ, "PYTHONPATH": ""}
    else:
        words = [sys.executable, "-m", "localattn", "export", model, "-o", path, "--mode", "step", "--chunk", "256"]
        words += ["--max-length", str(positions), *(("--weight-dtype", "int4") if maker == "ours_int4" else ())]
        environment = dict(os.environ)
    done = subprocess.run([str(word) for word in words], env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return path


def _run(name: str, path: Path, context: int, folder: Path) -> dict[str, Any]:
    """Seconds and memory of a candidate, and how far its logits are from those of our file, if they are known."""
    output = folder / f"{name}-{context}.npy"
    script = ROOT / "benchmarks" / "hugging_face" / "decoder_run.py"
    python, environment = sys.executable, dict(os.environ)
    if name == "optimum":
        python, environment = os.environ[OPTIMUM], {**os.environ, "PYTHONPATH": ""}
    words = [python, str(script), "ours" if name == "ours_int4" else name, str(path), str(context), str(TOKENS)]
    done = subprocess.run([*words, str(output)], env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1][:200]}
    entry: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    entry["peak_mib"] = round(entry.pop("peak_bytes") / 2**20)
    expected = folder / f"ours-{context}.npy"
    if expected.exists():
        differs = float(np.abs(np.load(output) - np.load(expected)).max())
        entry["differs_by"] = float(f"{differs:.2g}")
        if differs > AGREEMENT and name != "ours_int4":
            entry["failed"] = f"its logits differ by {differs:.2g}"
    return entry
