"""A Hugging Face decoder at the size of a small real one, token by token, beside other ways to run its folder.

The weights are random: nothing is fetched, and time does not depend on values. All candidates take the same prompt and
then the likeliest token, each in a process of its own; their tokens and the logits after the prompt are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..machine import ROOT
from ..target import Target
from .candidates import GENAI, OPTIMUM, SCRIPTS, Measurement, made, measured
from .decoder_run import LLAMA, THREADS
from .make import LLAMA_SOURCE
from .traffic import bytes_of_token, read_rate

CONTEXTS = (1024, 8192, 32768)
TOKENS = 32
CHUNK = 512
# Positions that a file has, or that a peer reserves: the least of these that hold the prompt and the tokens.
ROOMS = (8192 + 2 * TOKENS, 32768 + 2 * TOKENS)
LABELS = {
    "ours": "localattn, compiled kernels",
    "ours_functions": "localattn, functions",
    "optimum": "optimum-onnx",
    "transformers": "transformers' OnnxExporter",
    "genai": "onnxruntime-genai",
    "llama": "llama.cpp",
    "pytorch": "PyTorch, transformers' cache",
    "ours_int4": "localattn, int4",
    "genai_int4": "onnxruntime-genai, int4",
    "llama_int4": "llama.cpp, Q4_0",
}
# Candidates whose interpreter a variable names, and those that need what a variable names.
_INTERPRETERS = {"optimum": OPTIMUM, "genai": GENAI, "genai_int4": GENAI}
_NEEDED = {"llama": (LLAMA, LLAMA_SOURCE), "llama_int4": (LLAMA, LLAMA_SOURCE)}
# What their makers call their files.
_FILES = {"llama": "model.gguf", "llama_int4": "model.gguf", "transformers": "decode.onnx"}
_INT4 = "_int4"


@dataclass(frozen=True)
class Shape:
    """A model to measure.

    Args:
        result: name of the result.
        text: what it is.
        config: class of its configuration in transformers.
        sizes: what the configuration says.
    """

    result: str
    text: str
    config: str
    sizes: Mapping[str, Any]


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
_MISTRAL: Mapping[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "sliding_window": 4096,
}
SHAPES = {
    "gemma3": Shape("decoder", "Gemma-3-270m's shape, random weights", "Gemma3TextConfig", GEMMA_3_270M),
    "mistral": Shape("decoder_mistral", "a Mistral of 0.5 billion weights, random", "MistralConfig", _MISTRAL),
}


def measure(
    shape: Shape,
    folder: Path,
    contexts: Sequence[int],
    only: Sequence[str],
    tell: Callable[[str], None],
    keep: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Measure after prompts of so many tokens, and return the whole document; `folder` keeps the model and the files.

    See `Measurement.measure` for the rest.
    """
    model = _model(shape, folder)

    def file(name: str, context: int) -> Path | dict[str, str]:
        if name == "pytorch":
            return model
        if missing := [variable for variable in _NEEDED.get(name, ()) if variable not in os.environ]:
            return {"skipped": f"{' and '.join(missing)} must be set"}
        if not name.startswith("ours"):
            path = folder / name / _FILES.get(name, "model.onnx")
            words: list[object] = [SCRIPTS / "make.py", f"{name}_decoder", model, path]
            return made(path, words, elsewhere=_INTERPRETERS.get(name))
        room = room_for(context)
        path = folder / f"{'ours_int4' if name.endswith(_INT4) else 'ours'}-{room}" / "model.onnx"
        words = ["-m", "localattn", "export", model, "-o", path, "--mode", "step", "--chunk", CHUNK]
        return made(path, [*words, "--seq-len", room, *(("--weight-dtype", "int4") if name.endswith(_INT4) else ())])

    def run(name: str, path: Path, context: int) -> dict[str, Any]:
        words = [SCRIPTS / "decoder_run.py", name.removesuffix(_INT4), path, context, TOKENS, room_for(context)]
        output, expected = (folder / f"{kind}-{context}.npy" for kind in (name, "ours"))
        exact = not name.endswith(_INT4)
        found = measured(words, output, expected, "logits", exact=exact, elsewhere=_INTERPRETERS.get(name))
        judged = name == "llama" and "tokens" in found and expected.exists()  # it shows no logits to compare
        if judged and found["tokens"][0] != int(np.load(expected).argmax()):
            found["failed"] = "its first token is another one"
        if name.startswith("ours") and "token_ms" in found:
            found |= _over_rate(path, context, found["token_ms"])
        return found

    header = {"model": shape.text, "threads": THREADS, "tokens": TOKENS, "labels": LABELS}
    return Measurement(shape.result, "context", header, targets, file, run).measure(contexts, only, tell, keep)


def room_for(context: int) -> int:
    """Return the positions that a file has for a prompt of so many tokens and those after it."""
    needed = context + 2 * TOKENS
    return min((room for room in ROOMS if room >= needed), default=needed)


def targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """Never slower than the fastest peer, near the rate at which memory is read, and half of PyTorch's memory."""
    found = []
    for row in rows:
        context = row["context"]
        timed = {name: x for name, x in row["candidates"].items() if "token_ms" in x}
        for exact, text in ((True, ""), (False, "int4, ")):
            chosen = {name: x for name, x in timed.items() if name.endswith(_INT4) != exact}
            for figure, what in (("token_ms", "a token"), ("first_s", "the prompt")):
                peers = [x[figure] for name, x in chosen.items() if not name.startswith("ours")]
                own = [x[figure] for name, x in chosen.items() if name.startswith("ours")]
                if own and peers:
                    ratio = min(own) / min(peers)
                    found.append(Target(f"{text}{what} after {context} / the fastest peer's", ratio, 1.0))
        for name in ("ours", "ours_int4"):
            if "over_rate" in timed.get(name, {}):
                what = f"{LABELS[name]}: a token after {context} / its bytes at the measured rate"
                found.append(Target(what, timed[name]["over_rate"], 1.3))
        if "ours" in timed and "pytorch" in timed and context > min(CONTEXTS):
            ratio = timed["ours"]["peak_mib"] / timed["pytorch"]["peak_mib"]
            found.append(Target(f"memory after {context} / PyTorch's", ratio, 0.5))
    return found


def _over_rate(path: Path, context: int, token_ms: float) -> dict[str, float]:
    """What a token of this file reads, how fast this machine reads, and the token's time over the two's quotient."""
    read, rate = bytes_of_token(path, context), read_rate(THREADS)
    over = token_ms / (1e3 * read / (rate * 1e9))
    return {"read_gb_s": rate, "read_mib": round(read / 2**20), "over_rate": round(over, 2)}


def _model(shape: Shape, folder: Path) -> Path:
    """The model, made once."""
    path = folder / "model"
    if not (path / "config.json").exists():
        import torch
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, shape.config)(**{**shape.sizes, "max_position_embeddings": max(ROOMS)})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
        _save_tokenizer(path, config.vocab_size)
    return path


def _save_tokenizer(folder: Path, size: int) -> None:
    """Save a tokenizer of at most so many tokens, trained on the documentation: some builders open one."""
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, special_tokens=["<s>", "</s>"])
    tokenizer.train([str(page) for page in sorted((ROOT / "docs").glob("*.md"))], trainer)
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    saved.save_pretrained(folder)
