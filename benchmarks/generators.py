"""The ways to generate text that are measured against each other.

Each makes one token a call, sampling included, with a context of so many tokens before it; the first call's logits are
those after exactly this context. After a while a candidate goes back to its length, because it is the time *at* this
context that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localattn.runtime.generation.sampler import Sampler
from localattn.runtime.generation.sampling import Sampling

THREADS = 2
# Upstream keeps the likeliest tenth of the vocabulary; all do the same here.
KEPT = 0.1
# The last tokens of a context that upstream's cached generation takes one by one, as it does when it goes on.
_BY_CACHE = 8
# After so many tokens the context goes back to its length.
STRETCH = 64

Tokens = NDArray[np.int64]
# One token; returns the logits it was drawn from, `[V]`.
Run = Callable[[], NDArray[np.float32]]


@dataclass(frozen=True)
class Files:
    """What a benchmark's candidates are made of.

    Args:
        checkpoint: weights, with their configuration beside them.
        step: its step file.
    """

    checkpoint: Path
    step: Path

    @classmethod
    def in_folder(cls, folder: Path) -> Files:
        """By their names in a folder made by `benchmarks.cases.generate.prepare`."""
        return cls(folder / "model.pt", folder / "step.onnx")

    def full(self, length: int) -> Path:
        """The full file of a length."""
        return self.step.with_name(f"full_{length}.onnx")


def context(length: int) -> Tokens:
    """Tokens to go on from: held-out text of the demo, repeated."""
    from localattn.demo import validation_path

    text = np.frombuffer(validation_path().read_bytes(), dtype=np.uint8).astype(np.int64)
    return np.resize(text, length)


def _sampler(vocabulary: int) -> Sampler:
    return Sampler(Sampling(top_k=int(KEPT * vocabulary)), seed=0, rows=range(1))


def step(files: Files, length: int) -> Run:
    """The step file in onnxruntime."""
    from localattn.runtime.generation.generator import Generator

    generator = Generator.open(files.step, "cpu", THREADS)
    text = context(length)
    generator.prefill(text[:-1])
    sampler, token = _sampler(generator.vocabulary), text[-1:]

    def run() -> NDArray[np.float32]:
        nonlocal token
        if generator.position >= length + STRETCH:
            generator.session.position = length
        logits = generator.step(token)
        token = sampler.choose(logits)
        return logits[0]

    return run


def recompute(files: Files, length: int) -> Run:
    """The full file in onnxruntime, on the last tokens, for every token anew."""
    from localattn.runtime.session import load

    session = load(files.full(length), "cpu", THREADS)
    sampler = _sampler(int(session.outputs[0].shape[-1]))
    text = context(length)[None]

    def run() -> NDArray[np.float32]:
        nonlocal text
        logits: NDArray[np.float32] = session.run({"tokens": text})["logits"][:, -1]
        text = np.concatenate([text[:, 1:], sampler.choose(logits)[:, None]], axis=1)
        return logits[0]

    return run


def _upstream(files: Files, length: int, *, cached: bool) -> Run:
    """What `LocalTransformer.generate` does for a token, statement by statement."""
    import torch
    from local_attention.transformer import top_k

    torch.set_num_threads(THREADS)
    model = upstream_model(files.checkpoint)
    prime = torch.from_numpy(context(length))[None]
    out = prime
    cache = None
    with torch.inference_mode():
        for end in range(length - _BY_CACHE, length) if cached else ():
            cache = model(prime[:, :end], cache=cache, return_cache=True)[1]

    @torch.inference_mode()
    def run() -> NDArray[np.float32]:
        nonlocal cache, out
        logits, new_cache = model(out[:, -model.max_seq_len :], cache=cache, return_cache=True)
        if cached:
            cache = new_cache
        filtered = top_k(logits[:, -1], thres=1 - KEPT)
        sampled = torch.multinomial(torch.softmax(filtered, dim=-1), 1)
        out = torch.cat((out, sampled), dim=-1) if out.shape[1] < length + STRETCH else prime
        return np.asarray(logits[0, -1])

    return run


def upstream_model(checkpoint: Path) -> Any:
    """The upstream module with a checkpoint's weights."""
    import json

    import torch
    from local_attention import LocalTransformer

    kwargs = json.loads(checkpoint.with_suffix(".json").read_text(encoding="utf-8"))["kwargs"]
    model = LocalTransformer(**kwargs).eval()
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    return model


def products(files: Files) -> Run:
    """The limit: the model's weight matrices, each times one vector, in onnxruntime."""
    import onnx
    import onnxruntime
    import torch
    from onnx import TensorProto, helper, numpy_helper

    modules = upstream_model(files.checkpoint).modules()
    weights = [m.weight.detach().numpy().T for m in modules if isinstance(m, torch.nn.Linear)]
    tensors = [numpy_helper.from_array(np.ascontiguousarray(w), f"w{i}") for i, w in enumerate(weights)]
    nodes = [helper.make_node("MatMul", [f"x{len(w)}", f"w{i}"], [f"y{i}"]) for i, w in enumerate(weights)]
    sizes = {f"x{len(w)}": len(w) for w in weights}, {f"y{i}": w.shape[1] for i, w in enumerate(weights)}
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, size]) for name, size in part.items()]
        for part in sizes
    )
    graph = helper.make_graph(nodes, "products", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    rng, buffers = np.random.default_rng(0), {}
    for part, bind in zip(sizes, (binding.bind_ortvalue_input, binding.bind_ortvalue_output), strict=True):
        for name, size in part.items():
            buffers[name] = rng.standard_normal((1, 1, size), dtype=np.float32)
            bind(name, onnxruntime.OrtValue.ortvalue_from_numpy(buffers[name], "cpu", 0))
    last = buffers[f"y{len(weights) - 1}"][0, 0]

    def run() -> NDArray[np.float32]:
        session.run_with_iobinding(binding)
        return last

    return run


def upstream_cached(files: Files, length: int) -> Run:
    """The package's `generate` as it is called by default."""
    return _upstream(files, length, cached=True)


def upstream_uncached(files: Files, length: int) -> Run:
    """The package's `generate` with `use_kv_cache=False`."""
    return _upstream(files, length, cached=False)


@dataclass(frozen=True)
class Candidate:
    """One way to generate.

    Args:
        label: as tables and figures call it.
        prepare: everything up to the first token that is measured.
        exact: its logits are those of the model; the others' difference is only reported.
        slow: a token takes seconds after a long context, because all of it is computed anew.
    """

    label: str
    prepare: Callable[[Files, int], Run]
    exact: bool = True
    slow: bool = False


CANDIDATES = {
    "step": Candidate("localattn generate", step),
    "cached": Candidate("local-attention, cached", upstream_cached, exact=False),
    "uncached": Candidate("local-attention, uncached", upstream_uncached, slow=True),
    "recompute": Candidate("full ONNX file, recomputed", recompute, slow=True),
}


# By candidate, what it imports and does not count as its memory.
_LIBRARIES = {
    "step": ("onnxruntime", "localattn.runtime.generation.generator"),
    "recompute": ("onnxruntime", "localattn.runtime.session"),
    "cached": ("torch", "local_attention"),
    "uncached": ("torch", "local_attention"),
}


def import_libraries(candidate: str) -> None:
    """Import what a candidate needs."""
    for name in _LIBRARIES[candidate]:
        import_module(name)
