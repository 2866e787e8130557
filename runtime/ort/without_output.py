"""Pass: leave out an output, and all that is computed for it alone: a prompt's chunks need no logits."""

from __future__ import annotations

from typing import Any

from ...onnx_graph.graph_values import reads


def apply(model: Any, output: str) -> Any:
    """Return a copy of the model without the output, and without nodes and weights that serve nothing else.

    External data is not read: the copy refers to it as the model does.
    """
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    kept = [value for value in graph.output if value.name != output]
    needed = {value.name for value in kept}
    nodes = []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(reads(node))
            nodes.append(node)
    weights = [tensor for tensor in graph.initializer if tensor.name in needed]
    for field, left in (("output", kept), ("node", nodes[::-1]), ("initializer", weights)):
        taken = [type(x).FromString(x.SerializeToString()) for x in left]
        graph.ClearField(field)
        getattr(graph, field).extend(taken)
    return copy
