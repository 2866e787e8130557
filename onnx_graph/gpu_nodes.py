"""Find which attention nodes of a graph GPU kernels can compute, and let the others keep their function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.nodes.aft import AFT_VARIANT_BY_OP_TYPE
from ..core.nodes.attention import DOMAIN, VARIANT_BY_OP_TYPE
from ..core.nodes.gpu import (
    NARROWEST_HEAD,
    RINGS_BY_OP_TYPE,
    SERVED_BY_OP_TYPE,
    SMALLEST_XPOS_BASE,
    WIDEST_FP32_RING_HEAD,
    WIDEST_HEAD,
)
from ..core.nodes.grouped import GROUPED_BY_OP_TYPE
from ..core.nodes.step import STEP_VARIANT_BY_OP_TYPE
from .library_errors import infer_shapes

# onnx.TensorProto.DataType.
_ELEMENT = {1: "fp32", 10: "fp16", 16: "bf16", 17: "fp8"}

# Suffix of the op type of a node that no plugin may compute, and of its function's name.
_BY_FUNCTION = "ByFunction"


@dataclass(frozen=True)
class GpuNode:
    """Describe an attention node.

    Args:
        proto: the `onnx.NodeProto`.
        why_not: why no kernel computes it; empty if one does, as far as the file tells.
        dtype: element type of its query, "fp16", "bf16", "fp32" or "fp8"; None where the file does not tell.
        head_dim: width of its heads; None where the file does not tell.
    """

    proto: Any
    why_not: str
    dtype: str | None
    head_dim: int | None

    @property
    def name(self) -> str:
        """Its name, or if it has none its output's name."""
        return str(self.proto.name or self.proto.output[0])


def gpu_nodes(model: Any) -> list[GpuNode]:
    """List the attention nodes of a model's graph in order; `ring_nodes` lists those of a step file."""
    return _judged_nodes(model, {**VARIANT_BY_OP_TYPE, **GROUPED_BY_OP_TYPE})


def ring_nodes(model: Any) -> list[GpuNode]:
    """List the nodes of steps and chunks of a model's graph in order."""
    return _judged_nodes(model, STEP_VARIANT_BY_OP_TYPE)


def _judged_nodes(model: Any, op_types: Mapping[str, Any]) -> list[GpuNode]:
    named = [node for node in model.graph.node if node.domain == DOMAIN and node.op_type in op_types]
    nodes = [node for node in named if node.input]  # another program may have written nodes without names
    types = _tensor_types(model)
    if any(node.input[0] not in types for node in nodes):
        types = _tensor_types(infer_shapes(model))
    return [_judged(node, *types.get(node.input[0], (0, []))) for node in nodes]


def aft_nodes(model: Any) -> list[Any]:
    """List the AFT-local nodes of a model's graph that name the plugin; TensorRT uses the function of others."""
    nodes = (node for node in model.graph.node if node.domain == DOMAIN and node.op_type in AFT_VARIANT_BY_OP_TYPE)
    return [node for node in nodes if any(attribute.name == "plugin_namespace" for attribute in node.attribute)]


def keep_functions(model: Any, nodes: Iterable[Any]) -> None:
    """Rename the functions of these nodes to names that no plugin has, in place; the original functions stay too."""
    bodies = {body.name: body for body in model.functions if body.domain == DOMAIN}
    for node in nodes:
        body = bodies.get(node.op_type)
        if body is None:
            continue
        node.op_type += _BY_FUNCTION
        if node.op_type not in bodies:
            copy = model.functions.add()
            copy.CopyFrom(body)
            copy.name = node.op_type
            bodies[copy.name] = copy


def _judged(node: Any, element: int, shape: list[Any]) -> GpuNode:
    served = SERVED_BY_OP_TYPE.get(node.op_type) or RINGS_BY_OP_TYPE.get(node.op_type)
    head_dim = shape[3] if len(shape) == 4 and isinstance(shape[3], int) else None
    base = next((a.f for a in node.attribute if a.name == "xpos_scale_base"), 0.0)
    why = ""
    if served is None:
        why = "no kernel has both sinks and a softcap"
    elif node.op_type in SERVED_BY_OP_TYPE and getattr(served, "has_xpos", False) and base < SMALLEST_XPOS_BASE:
        why = f"its xpos base is {base:g}; kernels need {SMALLEST_XPOS_BASE:g} or more"
    elif head_dim is not None and not NARROWEST_HEAD <= head_dim <= WIDEST_HEAD:
        why = f"its head size is {head_dim}; kernels support {NARROWEST_HEAD} to {WIDEST_HEAD}"
    elif element == 1 and node.op_type in RINGS_BY_OP_TYPE and (head_dim or 0) > WIDEST_FP32_RING_HEAD:
        why = f"its head size is {head_dim}; fp32 kernels of step nodes support up to {WIDEST_FP32_RING_HEAD}"
    return GpuNode(node, why, _ELEMENT.get(element), head_dim)


def _tensor_types(model: Any) -> dict[str, tuple[int, list[Any]]]:
    """Return element type and shape of every tensor that the graph declares; dynamic axes by name."""
    graph = model.graph
    types: dict[str, tuple[int, list[Any]]] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            shape = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim]
            types[value.name] = (tensor.elem_type, shape)
    return types
