"""Generate with one candidate in this process: seconds of the prompt and of a token, memory, and the tokens.

python decoder_run.py NAME PATH CONTEXT TOKENS OUTPUT

It imports only what the candidate needs, because optimum-onnx has an environment of its own, with an older
transformers.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 2
# Tokens that count, after this many that do not.
_FIRST = 4
Logits = np.ndarray[Any, Any]
# Consumes tokens `[T]` and returns the logits after the last one, `[V]`.
Consume = Callable[[np.ndarray[Any, Any]], Logits]


def ours(path: Path) -> Consume:
    """The step file and its prefill file, by `localattn`; kernels as they are installed."""
    return _ours(path, "auto")


def ours_functions(path: Path) -> Consume:
    """The same without compiled kernels."""
    return _ours(path, "none")


def _ours(path: Path, plugin: str) -> Consume:
    from localattn.runtime.generation.generator import Generator

    generator = Generator.open(path, "cpu", THREADS, plugin=plugin)
    return lambda tokens: generator.prefill(tokens)[0]


def pytorch(path: Path) -> Consume:
    """The untouched model with the cache that its configuration asks for, attention by sdpa; the last token's logits.

    `generate` of transformers asks for no others either.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    return _with_cache(model, torch.inference_mode(), logits_to_keep=1)


def optimum(path: Path) -> Consume:
    """optimum's `ORTModelForCausalLM`, with its cache."""
    import onnxruntime
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    model = ORTModelForCausalLM.from_pretrained(path.parent, session_options=options, use_io_binding=False)
    return _with_cache(model, torch.inference_mode())


def _with_cache(model: Any, mode: Any, **options: Any) -> Consume:
    import torch

    kept: list[Any] = []
    seen = 0

    def consume(tokens: np.ndarray[Any, Any]) -> Logits:
        nonlocal seen
        seen += len(tokens)
        given = {"input_ids": torch.from_numpy(tokens)[None], "attention_mask": torch.ones((1, seen), dtype=torch.long)}
        with mode:
            out = model(**given, past_key_values=kept.pop() if kept else None, use_cache=True, **options)
        kept.append(out.past_key_values)
        return np.asarray(out.logits[0, -1].float().numpy())

    return consume


def peak() -> int:
    """Bytes that were resident at most."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def main(name: str, path: str, context: str, tokens: str, output: str) -> dict[str, Any]:
    """Take a prompt of so many tokens, then the likeliest token, again and again."""
    consume: Consume = globals()[name](Path(path))
    prompt = np.random.default_rng(0).integers(5, 30_000, int(context))
    began, cpu = time.perf_counter(), time.process_time()
    logits = consume(prompt)
    first = {"first_s": time.perf_counter() - began, "first_cpu_s": time.process_time() - cpu}
    np.save(output, logits)
    walls, chosen = [], []
    cpu = time.process_time()
    for index in range(int(tokens) + _FIRST):
        if index == _FIRST:
            cpu = time.process_time()
        chosen.append(int(np.argmax(logits)))
        began = time.perf_counter()
        logits = consume(np.array(chosen[-1:]))
        walls.append(time.perf_counter() - began)
    a_token = {
        "token_ms": 1e3 * statistics.median(walls[_FIRST:]),
        "token_cpu_ms": 1e3 * (time.process_time() - cpu) / int(tokens),
    }
    return {**{k: round(v, 3) for k, v in (first | a_token).items()}, "peak_bytes": peak(), "tokens": chosen}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
