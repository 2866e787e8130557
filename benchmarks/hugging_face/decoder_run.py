"""Generate with one candidate in this process: seconds of the prompt and of a token, memory, and the tokens.

python decoder_run.py NAME PATH CONTEXT TOKENS ROOM OUTPUT

It imports only what the candidate needs, because optimum-onnx has an environment of its own, with an older
transformers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 2
# The variable that names the folder of node-llama-cpp, the package that brings llama.cpp's libraries.
LLAMA = "LOCALATTN_BENCHMARKS_LLAMA"
# Peers whose attention has a number for every pair of tokens take a longer prompt in pieces, and those with logits for
# every token any prompt.
_WHOLE, _PIECE = 8192, 1024
_ALL_LOGITS = ("transformers",)
# Tokens that count, after this many that do not.
_FIRST = 4
Logits = np.ndarray[Any, Any]
# They take a prompt in chunks anyway.
_OWN = ("ours", "ours_functions")
# Consumes tokens `[T]` and returns the logits after the last one, `[V]`.
Consume = Callable[[np.ndarray[Any, Any]], Logits]


def ours(path: Path, _room: int) -> Consume:
    """The step file and its prefill file, by `localattn`, with the library of kernels in the cache."""
    from localattn.core.storage.library_store import CPU_KERNELS, find

    library = find(CPU_KERNELS)
    if library is None:  # sessions would go on without, and be measured as what they are not
        raise RuntimeError(f"no library of kernels of these sources: {CPU_KERNELS.how_to_build}")
    return _ours(path, str(library.path))


def ours_functions(path: Path, _room: int) -> Consume:
    """The same without compiled kernels."""
    return _ours(path, "none")


def _ours(path: Path, plugin: str) -> Consume:
    from localattn.runtime.generation.generator import Generator

    generator = Generator.open(path, "cpu", THREADS, plugin=plugin)
    generator.session.prepare()  # peers have one file, which is open before the first prompt
    return lambda tokens: generator.prefill(tokens)[0]


def pytorch(path: Path, _room: int) -> Consume:
    """The untouched model with the cache that its configuration asks for, attention by sdpa; the last token's logits.

    `generate` of transformers asks for no others either.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    return _with_cache(model, torch.inference_mode(), logits_to_keep=1)


def optimum(path: Path, _room: int) -> Consume:
    """optimum's `ORTModelForCausalLM`, with its cache."""
    import onnxruntime
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    model = ORTModelForCausalLM.from_pretrained(path.parent, session_options=options, use_io_binding=False)
    return _with_cache(model, torch.inference_mode())


def transformers(path: Path, _room: int) -> Consume:
    """The graph of transformers' `OnnxExporter` in its own runner; its logits are those of every token."""
    import onnxruntime
    import torch
    from transformers import DynamicCache
    from transformers.exporters.base import ExportedModel

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    model = ExportedModel.from_pretrained(path.parent, session_options=options)
    config, run, kept, seen = model.config, model.runners["decode"], DynamicCache(config=model.config), 0
    nothing = torch.zeros(1, config.num_key_value_heads, 0, config.head_dim)
    for layer in kept.layers:  # the graph takes keys and values, and a new layer has none
        layer.lazy_initialization(nothing, nothing)
        layer.keys = layer.values = nothing

    def consume(tokens: np.ndarray[Any, Any]) -> Logits:
        nonlocal kept, seen
        positions = torch.arange(seen, seen + len(tokens))[None]
        seen += len(tokens)
        given = {"input_ids": torch.from_numpy(tokens)[None], "position_ids": positions, "past_key_values": kept}
        out = run(**given)
        kept = out.past_key_values
        return np.asarray(out.logits[0, -1].float().numpy())

    return consume


def genai(path: Path, room: int) -> Consume:
    """onnxruntime-genai, with a folder of its own builder."""
    import onnxruntime_genai

    config = onnxruntime_genai.Config(str(path.parent))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": THREADS}}}}))
    model = onnxruntime_genai.Model(config)
    options = onnxruntime_genai.GeneratorParams(model)
    options.set_search_options(do_sample=False, max_length=room)
    generator = onnxruntime_genai.Generator(model, options)

    def consume(tokens: np.ndarray[Any, Any]) -> Logits:
        generator.append_tokens(tokens[None].astype(np.int32))
        return np.asarray(generator.get_logits(), np.float32).reshape(-1)

    return consume


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


def llama(path: str, prompt: Logits, tokens: int, room: str) -> dict[str, Any]:
    """llama.cpp, in a process of Node; it shows no logits, and keeps keys and values in fp16."""
    words = ("node", Path(__file__).with_name("llama.mjs"), os.environ[LLAMA], path, room, THREADS, tokens + _FIRST)
    done = subprocess.run([str(x) for x in words], input=json.dumps(prompt.tolist()), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.split())[-200:])
    found = json.loads(done.stdout.splitlines()[-1])
    (first, *walls), (first_cpu, *cpus) = found["seconds"], found["cpu"]
    return {
        "open_s": found["opened"],
        "first_s": first,
        "first_cpu_s": first_cpu,
        "token_ms": 1e3 * statistics.median(walls[_FIRST:]),
        "token_cpu_ms": 1e3 * statistics.mean(cpus[_FIRST:]),
        "peak_bytes": found["peak_bytes"],
        "tokens": found["tokens"][:-1],  # as many as the others choose
    }


def main(name: str, path: str, context: str, tokens: str, room: str, output: str) -> dict[str, Any]:
    """Take a prompt of so many tokens, then the likeliest token, again and again."""
    prompt = np.random.default_rng(0).integers(5, 30_000, int(context))
    if name == "llama":
        found = llama(path, prompt, int(tokens), room)
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}
    began = time.perf_counter()
    consume: Consume = globals()[name](Path(path), int(room))
    opened = time.perf_counter() - began
    began, cpu = time.perf_counter(), time.process_time()
    cut = name in _ALL_LOGITS or (len(prompt) > _WHOLE and name not in _OWN)
    pieces = range(_PIECE, len(prompt), _PIECE) if cut else ()
    for piece in np.split(prompt, pieces):
        logits = consume(piece)
    first = {"open_s": opened, "first_s": time.perf_counter() - began, "first_cpu_s": time.process_time() - cpu}
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
