"""Name nodes and values after the module they come from: `layers.0.0.branch/MatMul_2`.

Inputs, outputs and weights keep their names. A constant is named after the first node that reads it and the input of
the operator: `layers.0.0.branch/Reshape.shape`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

# The key of a node's metadata that holds the path of its module.
MODULE = "module"


def name_by_module(model: Any) -> None:
    """Rename the nodes, their results and the constants of an `onnx_ir.Model`, in place."""
    graph = model.graph
    # Nodes and values have separate names: a result has the name of its node.
    names, calls = _Names(x.name for x in (*graph.inputs, *graph.outputs, *graph.initializers.values())), _Names(())
    nodes = list(graph.all_nodes())
    outputs = set(graph.outputs)
    for node in nodes:
        path = node.metadata_props.get(MODULE, "")
        node.metadata_props.clear()
        if path:
            node.metadata_props[MODULE] = path
        node.name = calls.new(f"{path}/{node.op_type}" if path else node.op_type)
        for place, value in enumerate(node.outputs):
            if value not in outputs and value.name:
                several = len(node.outputs) > 1
                value.name = names.new(f"{node.name}.{_formal(node, place, 'outputs')}" if several else node.name)
    renamed = set()
    for node in nodes:
        for place, value in enumerate(node.inputs):
            if value is None or value in renamed or value.graph is not graph or not _is_constant(graph, value):
                continue
            renamed.add(value)
            value.name = names.new(f"{node.name}.{_formal(node, place, 'inputs')}")


def _is_constant(graph: Any, value: Any) -> bool:
    """Check whether a value is a constant that the exporter numbered; weights have the path of a parameter."""
    return graph.initializers.get(value.name) is value and value not in graph.inputs and "." not in value.name


class _Names:
    """Make names unique.

    Args:
        used: names that may not be used again.
    """

    def __init__(self, used: Iterable[str]) -> None:
        self._used, self._count = set(used), Counter[str]()

    def new(self, wanted: str) -> str:
        """Return the name, with a number from its second use on."""
        name = wanted
        while name in self._used or not self._count[wanted]:
            self._count[wanted] += 1
            name = wanted if self._count[wanted] == 1 else f"{wanted}_{self._count[wanted]}"
        self._used.add(name)
        return name


def _formal(node: Any, place: int, side: str) -> str:
    """Return the operator's name for its input or output at a position; the number if it is variadic."""
    import onnx

    try:
        listed = getattr(onnx.defs.get_schema(node.op_type, node.domain), side)
    except onnx.defs.SchemaError:
        return str(place)
    several = place >= len(listed) or listed[place].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    return str(place) if several else listed[place].name
