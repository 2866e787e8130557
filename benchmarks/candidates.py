"""The ways to compute windowed attention that are measured against each other.

Each takes query, key and value `[1, H, N, D]` in fp32 and returns the same. The dense ones get their
`[N, N]` mask as an input, ready made: neither its making nor its memory is held against them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from numpy.typing import NDArray

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import (
    DOMAIN,
    DOMAIN_VERSION,
    HEADS_FIRST,
    NodeAttributes,
    NodeVariant,
    choose_query_block,
)
from localattn.core.versions import DEFAULT_OPSET, IR_VERSION
from localattn.exporter.lowering.functions import attach_functions

from .cases.compiled import library, why_no_library

THREADS = 2
HEADS, HEAD_DIM = 8, 64
GEOMETRY = WindowGeometry(256, look_backward=1, look_forward=0, causal=True, exact_windowsize=True)
SCALE = HEAD_DIM**-0.5

Array = NDArray[np.float32]
Run = Callable[[], Array]


@dataclass(frozen=True)
class Candidate:
    """One way to compute it.

    Args:
        label: as tables and figures call it.
        prepare: everything up to the call that is measured, from the inputs.
        dense: it computes all `N²` scores.
        why_not: the reason why this machine cannot run it, or None.
    """

    label: str
    prepare: Callable[[dict[str, Array]], Run]
    dense: bool
    why_not: Callable[[], str | None] = lambda: None


def random_inputs(length: int) -> dict[str, Array]:
    """Query, key and value."""
    rng = np.random.default_rng(0)
    shape = (1, HEADS, length, HEAD_DIM)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name in ("query", "key", "value")}


def _visible(length: int) -> NDArray[np.bool_]:
    """The mask `[N, N]`, True where a query sees a key."""
    positions = np.arange(length)
    return GEOMETRY.visibility(positions, positions, length)


def value_of(name: str, shape: list[int], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def open_session(
    model: str | bytes, kernels: Path | None = None, profile_to: Path | None = None, threads: int = THREADS
) -> onnxruntime.InferenceSession:
    """A session on the CPU as all candidates have it: a library of compiled kernels or none, a profile or none."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if kernels is not None:
        options.register_custom_ops_library(str(kernels))
    if profile_to is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile_to)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def in_onnxruntime(
    inputs: list[ir.Value],
    nodes: list[ir.Node],
    feed: dict[str, Any],
    *,
    opset: int,
    kernels: Path | None = None,
    threads: int = THREADS,
) -> Run:
    """A session of a graph of these nodes, ready to run; the last node gives the output.

    `kernels` is a library that onnxruntime loads for them.
    """
    output = nodes[-1].outputs[0]
    output.name, output.shape, output.type = "out", inputs[0].shape, inputs[0].type
    opsets = {"": opset, DOMAIN: DOMAIN_VERSION}
    graph = ir.Graph(inputs, [output], nodes=nodes, opset_imports=opsets, name="candidate")
    model = ir.Model(graph, ir_version=IR_VERSION)
    attach_functions(model)
    session = open_session(ir.serde.serialize_model(model).SerializeToString(), kernels, threads=threads)
    return lambda: np.asarray(session.run(["out"], feed)[0])


def _node(feed: dict[str, Array], kernels: Path | None = None) -> Run:
    """The exported node, its function definition inlined by onnxruntime, as `localattn export` writes it."""
    inputs = [value_of(name, list(x.shape)) for name, x in feed.items()]
    node = attention_node(inputs, GEOMETRY, masked=False)
    return in_onnxruntime(inputs, [node], feed, opset=DEFAULT_OPSET, kernels=kernels)


def attention_node(inputs: list[ir.Value], geometry: WindowGeometry, *, masked: bool) -> ir.Node:
    """The node as `localattn export` writes it."""
    variant = NodeVariant(has_mask=masked, has_bias=False, has_xpos=False)
    length = inputs[0].shape[2]  # type: ignore[index]
    block = choose_query_block(geometry, int(length), has_bias=False)  # type: ignore[arg-type]
    attributes = NodeAttributes(geometry, SCALE, perm=HEADS_FIRST, query_block=block)
    return ir.node(variant.op_type, inputs, attributes=attributes.as_onnx(), domain=DOMAIN)


def _kernel(feed: dict[str, Array]) -> Run:
    """The same node, computed by the compiled kernel."""
    return _node(feed, library())


def _dense_add(feed: dict[str, Array]) -> Run:
    """MatMul, Add of an `N×N` mask of 0 and a huge negative, Softmax, MatMul: the best such a graph can do."""
    mask = np.where(_visible(feed["query"].shape[2]), np.float32(0), np.float32(-1e30))
    return dense_graph(feed, mask, add_mask)


def _dense_where(feed: dict[str, Array]) -> Run:
    """The same with Where and a boolean mask, as PyTorch's exporter writes `masked_fill`."""

    def hide(scores: ir.Value, mask: ir.Value) -> list[ir.Node]:
        hidden = ir.node("Constant", [], attributes={"value_float": -1e30})
        return [hidden, ir.node("Where", [mask, scores, hidden.outputs[0]])]

    return dense_graph(feed, _visible(feed["query"].shape[2]), hide)


def add_mask(scores: ir.Value, mask: ir.Value) -> list[ir.Node]:
    """Scores with a mask of 0 and a huge negative added."""
    return [ir.node("Add", [scores, mask])]


def dense_graph(feed: dict[str, Array], mask: NDArray[Any], hide: Callable[[ir.Value, ir.Value], list[ir.Node]]) -> Run:
    """Dense attention; `hide` makes the nodes that apply the mask to the scores."""
    typed = {**feed, "mask": mask}
    inputs = [value_of(name, list(x.shape), ir.DataType.from_numpy(x.dtype)) for name, x in typed.items()]
    query, key, value, mask_input = inputs
    scale = ir.node("Constant", [], attributes={"value": ir.tensor(np.array(SCALE, feed["query"].dtype))})
    scaled = ir.node("Mul", [query, scale.outputs[0]])
    turned = ir.node("Transpose", [key], attributes={"perm": [0, 1, 3, 2]})
    scores = ir.node("MatMul", [scaled.outputs[0], turned.outputs[0]])
    masked = hide(scores.outputs[0], mask_input)
    weights = ir.node("Softmax", [masked[-1].outputs[0]], attributes={"axis": -1})
    output = ir.node("MatMul", [weights.outputs[0], value])
    nodes = [scale, scaled, turned, scores, *masked, weights, output]
    return in_onnxruntime(inputs, nodes, typed, opset=DEFAULT_OPSET)


def _attention_operator(feed: dict[str, Array]) -> Run:
    """ONNX's Attention operator with a dense boolean mask; it has no window that onnxruntime honours."""
    shape = list(feed["query"].shape)
    mask = _visible(shape[2])
    inputs = [
        *(value_of(name, shape) for name in feed),
        value_of("mask", list(mask.shape), ir.DataType.BOOL),
    ]
    node = ir.node("Attention", inputs, attributes={"scale": SCALE})
    return in_onnxruntime(inputs, [node], {**feed, "mask": mask}, opset=23)


def _tensors(feed: dict[str, Array]) -> list[torch.Tensor]:
    torch.set_num_threads(THREADS)
    return [torch.from_numpy(array) for array in feed.values()]


def without_gradients(compute: Callable[[], torch.Tensor]) -> Run:
    """What PyTorch computes, as numpy has it."""

    def run() -> Array:
        with torch.inference_mode():
            return compute().numpy()

    return run


@cache
def upstream_module(geometry: WindowGeometry) -> torch.nn.Module:
    """local-attention's own module; rotary off, so the same mathematics."""
    from local_attention import LocalAttention

    return LocalAttention(**asdict(geometry), use_rotary_pos_emb=False).eval()


def _upstream(feed: dict[str, Array]) -> Run:
    """The package the models are trained with, in eager PyTorch."""
    tensors, module = _tensors(feed), upstream_module(GEOMETRY)
    return without_gradients(lambda: module(*tensors))


def _torch_sdpa(feed: dict[str, Array]) -> Run:
    """PyTorch's fused attention with a dense boolean mask."""
    tensors = _tensors(feed)
    mask = torch.from_numpy(_visible(feed["query"].shape[2]))
    attention = torch.nn.functional.scaled_dot_product_attention
    return without_gradients(lambda: attention(*tensors, attn_mask=mask))


CANDIDATES = {
    "node": Candidate("localattn node", _node, dense=False),
    "kernel": Candidate("localattn, compiled kernel", _kernel, dense=False, why_not=why_no_library),
    "upstream": Candidate("local-attention, eager", _upstream, dense=False),
    "sdpa": Candidate("torch SDPA, n×n mask", _torch_sdpa, dense=True),
    "attention_op": Candidate("ONNX Attention, n×n mask", _attention_operator, dense=True),
    "dense": Candidate("dense ONNX, Add", _dense_add, dense=True),
    "dense_where": Candidate("dense ONNX, Where", _dense_where, dense=True),
}
