"""Round the inputs of attention nodes to fp8 (E4M3), by pairs of operators that the plugin library understands.

    query → QuantizeLinear (s) → DequantizeLinear (s) → attention; key and value likewise

Each of the three has one constant scale. E4M3 is a floating-point type, whose numbers have as many digits at 448 as at
2⁻⁶: so a scale need not be near. It is a power of two that leaves 4 to 8 times the largest number of a run on random
inputs; what is larger still is cut off there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ....core.error_texts import argument
from ....core.errors import ExportFailed, UsageError
from ....core.nodes.gpu import NARROWEST_HEAD, WIDEST_FP8_HEAD, computes_in_fp8
from ....onnx_graph.graph_values import add_constant, node_like
from ....runtime.inputs.arrays import random_inputs
from ...source.source_model import SourceModel
from ..trace import attention_nodes, entry_of

_log = logging.getLogger(__name__)

# By an attention node's name: of query, key and value.
Scales = Mapping[str, tuple[float, float, float]]

OPSET_FROM, DTYPES = 19, ("fp32", "fp16")
_LARGEST, _ROOM = 448.0, 4.0
# Smaller numbers, or zeros, use the scale of this number, which is normal in fp16.
_LEAST = 1e-2
_INPUTS = ("query", "key", "value")


def check_attention(attention: str | None, dtype: str, opset: int) -> None:
    """Refuse an element type of attention that is unknown or incompatible with the file's other options.

    Raises:
        UsageError: it is one of these.
    """
    if attention is None:
        return
    if attention != "fp8":
        raise UsageError(f"Unknown element type {attention!r} of attention.", fix="Known: fp8.")
    if dtype not in DTYPES:
        raise UsageError(
            f"Attention in fp8 does not support {dtype}.",
            why="onnxruntime rounds only fp32 and fp16 to fp8, and the kernels return fp16.",
            fix=f"Use {' or '.join(DTYPES)}.",
        )
    if opset < OPSET_FROM:
        raise UsageError(
            f"Attention in fp8 needs opset {OPSET_FROM}.",
            why=f"Opset {opset} has no fp8 numbers.",
            fix=f"Give {argument('opset', OPSET_FROM)}.",
        )


def measure(source: SourceModel, model: ir.Model) -> Scales:
    """Run the model in fp32 on random inputs, and return the scales of its attention nodes.

    Args:
        source: what was traced.
        model: the trace.

    Raises:
        ExportFailed: an input of attention is not finite, or the run has other nodes than the trace.
    """
    nodes = attention_nodes(model)
    watch = _Watch()
    inputs = random_inputs(source.inputs("fp32"), 0, token_limit=source.token_limit)
    with torch.no_grad(), watch:
        entry_of(source, "fp32")(*(torch.from_numpy(inputs[spec.name]) for spec in source.inputs("fp32")))
    if len(watch.largest) != len(nodes):
        raise ExportFailed(
            "The scales of attention in fp8 cannot be measured.",
            why=f"The model ran {len(watch.largest)} attention operators, and its graph has {len(nodes)}.",
        )
    found: dict[str, tuple[float, float, float]] = {}
    for node, largest in zip(nodes, watch.largest, strict=True):
        if not all(map(math.isfinite, largest)):
            raise ExportFailed(f"{node.name} cannot be computed in fp8.", why="One of its inputs is NaN or infinite.")
        query, key, value = (2.0 ** math.ceil(math.log2(max(x, _LEAST) * _ROOM / _LARGEST)) for x in largest)
        found[node.name or ""] = query, key, value
    return found


def quantize_attention(model: ir.Model, scales: Scales) -> ir.Model:
    """Round the inputs of the attention nodes that kernels compute in fp8, in place, and return the model.

    Args:
        model: traced, fp32 or fp16.
        scales: of its nodes; 1 where a node has none.

    Raises:
        UsageError: no node can be computed in fp8.
    """
    nodes = [node for node in attention_nodes(model) if _has_kernel(node)]
    if not nodes:
        raise UsageError(
            "No attention node of the model can be computed in fp8.",
            why=f"fp8 kernels support head sizes {NARROWEST_HEAD} to {WIDEST_FP8_HEAD} and a key mask, but no bias, "
            "xpos, "
            "softcap, sinks or shared_qk.",
            fix="Export without fp8 attention.",
        )
    _log.info("attention of %d nodes in fp8", len(nodes))
    for node in nodes:
        for index, scale in enumerate(scales.get(node.name or "", (1.0, 1.0, 1.0))):
            _insert(model, node, index, scale)
    return model


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note the largest magnitudes of query, key and value of each attention operator, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest: list[list[float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.localattn.windowed_attention.default, torch.ops.localattn.grouped_attention.default):
            self.largest.append([float(x.abs().max()) for x in args[:3]])
        return func(*args, **(kwargs or {}))


def _has_kernel(node: ir.Node) -> bool:
    query = node.inputs[0]
    width = None if query is None or query.shape is None else query.shape[3]
    shared_qk = "shared_qk" in node.attributes and bool(node.attributes["shared_qk"].as_int())
    return isinstance(width, int) and computes_in_fp8(node.op_type, width, shared_qk=shared_qk)


def _insert(model: ir.Model, node: ir.Node, index: int, scale: float) -> None:
    """Insert a pair before one input of a node."""
    source, graph, name = node.inputs[index], node.graph, f"{node.name}.{_INPUTS[index]}"
    assert source is not None and source.dtype is not None and graph is not None
    constants = [
        add_constant(model.graph, f"{name}.scale", np.array(scale, source.dtype.numpy())),
        add_constant(model.graph, "fp8.zero", np.array(0, ir.DataType.FLOAT8E4M3FN.numpy())),
    ]
    value = source
    for op, dtype in (("QuantizeLinear", ir.DataType.FLOAT8E4M3FN), ("DequantizeLinear", source.dtype)):
        part = node_like(node, op, [value, *constants], source.shape, dtype, f"{name}.{op}")
        graph.insert_before(node, part)
        value = part.outputs[0]
    node.replace_input_with(index, value)
