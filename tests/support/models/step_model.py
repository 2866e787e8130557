"""A step file made by hand, small enough to compute in a few lines of numpy.

    logits[t] = (mean of the last WINDOW embeddings) · W + (number of tokens before t) · u

with a ring of embeddings as one cache, and a counter that starts at -1 as the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from localattn.core.documents.sidecar import Sidecar, sidecar_path
from localattn.runtime.generation.generator import Generator

WINDOW, WIDTH = 3, 4


def weights(vocabulary: int) -> dict[str, np.ndarray]:
    """Embeddings `[V, d]`, `W [d, V]` and `u [V]`."""
    rng = np.random.default_rng(7)
    shapes = {"embeddings": (vocabulary, WIDTH), "W": (WIDTH, vocabulary), "u": (vocabulary,)}
    scale = {"u": 0.01}  # small, or the drift alone would soon decide every token
    return {
        name: (scale.get(name, 1) * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()
    }


def expected_logits(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """`[B, N]` → `[B, N, V]`, from the formula."""
    w = weights(vocabulary)
    out = [
        w["embeddings"][tokens[:, max(0, t - WINDOW + 1) : t + 1]].mean(axis=1) @ w["W"] + t * w["u"]
        for t in range(tokens.shape[1])
    ]
    return np.stack(out, axis=1)


def check_logits(generator: Generator, tokens: np.ndarray, vocabulary: int, splits: Sequence[Sequence[int]]) -> None:
    """However tokens come, in pieces of these sizes, the logits after each piece are those of the formula."""
    expected = expected_logits(tokens, vocabulary)
    for pieces in splits:
        generator.reset()
        for piece in pieces:
            start = generator.position
            generator.prefill(tokens[:, start : start + piece])
            np.testing.assert_allclose(generator.logits, expected[:, start + piece - 1], rtol=1e-5, atol=1e-5)
        assert generator.position == tokens.shape[1]


def write(
    folder: Path,
    *,
    vocabulary: int = 256,
    batch: int = 1,
    chunk: int = 4,
    max_positions: int | None = None,
    in_place: bool = True,
    prefill_in_place: bool = False,
) -> Path:
    """Step and prefill file with their sidecars; returns the step file."""
    step = folder / "model_step.onnx"
    prefill = "model_step.prefill.onnx" if chunk > 1 else None
    _write_one(step, vocabulary, batch, 1, max_positions, in_place, prefill)
    if prefill:
        _write_one(folder / prefill, vocabulary, batch, chunk, max_positions, prefill_in_place, None)
    return step


def _write_one(path, vocabulary, batch, chunk, max_positions, in_place, prefill) -> None:
    onnx.save(_model(vocabulary, batch, chunk), path)
    caches = [
        {"input": "ring", "output": "next_ring", "shape": [batch, WINDOW, WIDTH], "dtype": "float32", "fill": 0.0},
        {"input": "age", "output": "next_age", "shape": [batch, 1], "dtype": "float32", "fill": -1.0},
    ]
    step = {
        "mode": "step" if chunk == 1 else "prefill", "chunk": chunk, "token_input": "tokens", "sequence_axis": 1,
        "logits_output": "logits", "caches": caches, "max_positions": max_positions, "in_place": in_place,
        "prefill": prefill,
    }  # fmt: skip
    sidecar = {
        "class": "local_attention.LocalTransformer", "kwargs": {"num_tokens": vocabulary}, "inputs": [],
        "outputs": [], "seq_len": chunk, "batch": batch, "dtype": "fp32", "opset": 20, "function_body": False,
        "checkpoint_sha256": "ab", "checkpoint_name": "model.pt", "model_sha256": "", "created": "", "step": step,
    }  # fmt: skip
    sidecar_path(path).write_text(Sidecar.model_validate(sidecar).to_json())


def _model(vocabulary: int, batch: int, chunk: int) -> onnx.ModelProto:
    """The formula for `chunk` tokens, one after the other."""
    constants = {
        **weights(vocabulary),
        "slots": np.arange(WINDOW).reshape(1, WINDOW, 1),
        "size": np.array([WINDOW]),
        "one": np.array([1]),
        "one_float": np.array([[1]], np.float32),
        "slot_axis": np.array([1]),
    }
    nodes: list[onnx.NodeProto] = []

    def node(op: str, inputs: list[str], output: str, **attributes) -> str:
        nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    embedded = node("Gather", ["embeddings", "tokens"], "embedded")
    ring, age, logits = "ring", "age", []
    for c in range(chunk):
        last = c == chunk - 1
        constants[f"c{c}"], constants[f"c{c}_end"] = np.array([c]), np.array([c + 1])
        new = node("Slice", [embedded, f"c{c}", f"c{c}_end", "slot_axis"], f"new{c}")
        position = node("Add", ["position", f"c{c}"], f"position{c}")
        slot = node("Mod", [position, "size"], f"slot{c}")
        here = node("Equal", ["slots", slot], f"here{c}")
        ring = node("Where", [here, new, ring], "next_ring" if last else f"ring{c}")
        seen = node("Min", [node("Add", [position, "one"], f"past{c}"), "size"], f"seen{c}")
        divisor = node("Cast", [seen], f"divisor{c}", to=TensorProto.FLOAT)
        total = node("ReduceSum", [ring, "slot_axis"], f"total{c}", keepdims=1)
        mean = node("Div", [total, divisor], f"mean{c}")
        age = node("Add", [age, "one_float"], "next_age" if last else f"age{c}")
        drift = node("Unsqueeze", [node("Mul", [age, "u"], f"aged{c}"), "slot_axis"], f"drift{c}")
        logits.append(node("Add", [node("MatMul", [mean, "W"], f"score{c}"), drift], f"logits{c}"))
    node("Concat", logits, "logits", axis=1)
    tensor = helper.make_tensor_value_info
    caches = {"ring": [batch, WINDOW, WIDTH], "age": [batch, 1]}
    graph = helper.make_graph(
        nodes,
        "step",
        [
            tensor("tokens", TensorProto.INT64, [batch, chunk]),
            tensor("position", TensorProto.INT64, [1]),
            *(tensor(name, TensorProto.FLOAT, shape) for name, shape in caches.items()),
        ],
        [
            tensor("logits", TensorProto.FLOAT, [batch, chunk, vocabulary]),
            *(tensor("next_" + name, TensorProto.FLOAT, shape) for name, shape in caches.items()),
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model
