"""A Hugging Face decoder at the size of Gemma-3-270m, token by token, beside other ways to run its folder.

The weights are random, in the shape of the real model: nothing is fetched, and time does not depend on values. All
candidates take the same prompt and then the likeliest token, each in a process of its own; their tokens and the logits
after the prompt are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..target import Target
from .candidates import SCRIPTS, Measurement, made, measured
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
GEMMA_3_270M: Mapping[str, Any] = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32_768,
}
_EXACT = ("ours", "ours_functions")


def measure(
    folder: Path,
    contexts: Sequence[int],
    only: Sequence[str],
    tell: Callable[[str], None],
    keep: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Measure after prompts of so many tokens, and return the whole document; `folder` keeps the model and the files.

    See `Measurement.measure` for the rest.
    """
    positions = max(contexts) + 2 * TOKENS
    model = _model(folder, positions)

    def file(name: str) -> Path | dict[str, str]:
        if name == "pytorch":
            return model
        path = folder / ("ours" if name in _EXACT else name) / "model.onnx"
        if name == "optimum":
            return made(path, [SCRIPTS / "make.py", "optimum_decoder", model, path], optimum=True)
        words = ["-m", "localattn", "export", model, "-o", path, "--mode", "step", "--chunk", 256]
        words += ["--max-length", positions, *(("--weight-dtype", "int4") if name == "ours_int4" else ())]
        return made(path, words)

    def run(name: str, path: Path, context: int) -> dict[str, Any]:
        words = [SCRIPTS / "decoder_run.py", "ours" if name == "ours_int4" else name, path, context, TOKENS]
        output, expected = (folder / f"{kind}-{context}.npy" for kind in (name, "ours"))
        return measured(words, output, expected, "logits", exact=name != "ours_int4", optimum=name == "optimum")

    facts = {"model": "Gemma-3-270m's shape, random weights", "threads": THREADS, "tokens": TOKENS, "labels": LABELS}
    return Measurement(NAME, "context", facts, targets, file, run).measure(contexts, only, tell, keep)


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
        longest = max(GEMMA_3_270M["max_position_embeddings"], positions)
        config = transformers.Gemma3TextConfig(**{**GEMMA_3_270M, "max_position_embeddings": longest})
        transformers.Gemma3ForCausalLM(config).save_pretrained(path)
    return path
