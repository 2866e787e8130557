"""Pass: let the node that writes residual streams also read and normalize them.

Streams are a model's widest tensors, more than a core's cache holds: a node that writes a token of them and reads it at
once passes over them once less. Every branch of `LocalTransformer` begins with a LayerNorm.
"""

from __future__ import annotations

from typing import Any

from ...core.nodes.fused import FUSED_DOMAIN, NORM_EPSILON
from ..standard_ops.names import MODULE
from .matching import attribute, only_user

# The key of a node's metadata that holds the path of the norm's module; the node's own path is that of the module that
# writes or reads.
NORM = "norm"


def apply(model: Any) -> None:
    """Join every `ReadStreams` of an `onnx_ir.Model` with the norm after it and the `MixStreams` before it, in place.

    One without a norm stays.
    """
    for node in list(model.graph):
        if _is(node, "ReadStreams"):
            norm = _norm_of(node.outputs[0])
            if norm is not None:
                _join(model.graph, node, norm)


def _is(node: Any, op_type: str) -> bool:
    return node is not None and node.domain == FUSED_DOMAIN and node.op_type == op_type


def _norm_of(read: Any) -> Any:
    """Return the LayerNorm of channels that is the only user of a value, or of its view without an axis; or None."""
    view = only_user(read, "Squeeze")
    norm = only_user(read if view is None else view.outputs[0], "LayerNormalization")
    if norm is None or len(norm.inputs) != 3 or len(norm.outputs) != 1 or norm.outputs[0].is_graph_output():
        return None
    epsilon, axis = attribute(norm, "epsilon", NORM_EPSILON), attribute(norm, "axis", -1)
    shapes = [x.shape for x in norm.inputs[1:] if x is not None and x.is_initializer()]
    alike = len(shapes) == 2 and all(shape is not None and len(shape) == 1 for shape in shapes)
    last = axis == -1 or (norm.inputs[0].shape is not None and axis == len(norm.inputs[0].shape) - 1)
    return norm if alike and last and abs(epsilon - NORM_EPSILON) < 1e-3 * NORM_EPSILON else None


def _join(graph: Any, node: Any, norm: Any) -> None:
    import onnx_ir as ir

    before = node.inputs[0].producer()
    old, op_type = [node], "ReadStreamsNorm"
    inputs, outputs = [*node.inputs], [*node.outputs]
    if _is(before, "MixStreams"):
        old, op_type = [before, node], "MixReadStreamsNorm"
        inputs, outputs = [*before.inputs, *node.inputs[1:]], [*before.outputs, *node.outputs]
    scale, shift = norm.inputs[1:]
    properties = dict(old[0].metadata_props)
    if MODULE in norm.metadata_props:
        properties[NORM] = norm.metadata_props[MODULE]
    ir.convenience.replace_all_uses_with(norm.outputs[0], norm.inputs[0])
    graph.remove(norm, safe=True)
    made = ir.node(
        op_type,
        [*inputs, scale, shift],
        domain=FUSED_DOMAIN,
        num_outputs=len(outputs),
        metadata_props=properties,
    )
    ir.convenience.replace_nodes_and_values(graph, old[0], old, [made], outputs, made.outputs)
