"""Pass: let attention read its inputs as products give them, `[B, N, H, D]`, without the model's transposes.

Between the transposed inputs and the attention node there may be operations that treat every head of every token alike:
norms over a head, rotary embedding, sums and products. They are moved over the Transposes, which then go.
"""

from __future__ import annotations

from typing import Any

from ...core.nodes.attention import DOMAIN, HEADS_FIRST, SEQUENCE_FIRST, VARIANT_BY_OP_TYPE
from ...core.nodes.fused import FUSED_DOMAIN, ROTATIONS
from ...core.nodes.grouped import GROUPED_BY_OP_TYPE
from .matching import attribute, cut_of, integers, only_user, users
from .rotary import PAIRS, Tables

_ATTENTION = VARIANT_BY_OP_TYPE.keys() | GROUPED_BY_OP_TYPE.keys()
# Operators that compute each element from elements at the same place, or from the last axis.
_BY_ELEMENT = frozenset(("Add", "Cast", "Div", "Mul", "Neg", "Pow", "Reciprocal", "Sqrt", "Sub"))
_SWAPPED = (0, 2, 1, 3)


def apply(model: Any) -> None:
    """Change the layout of the attention nodes of an `onnx_ir.Model`, in place, where that saves a Transpose."""
    tables = Tables(model.graph)
    for node in list(model.graph):
        if node.domain == DOMAIN and node.op_type in _ATTENTION and tuple(attribute(node, "perm", ())) == HEADS_FIRST:
            region = _Region(node)
            if region.found:
                region.turn(model.graph, tables)


class _Region:
    """Collect the nodes between the Transposes and an attention node.

    Args:
        attention: a node that takes `[B, H, N, D]`.

    Its `found` says whether every way to queries, keys and values begins with such a Transpose, and nothing else reads
    what lies between.
    """

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.transposes: list[Any] = []
        self.nodes: list[Any] = []
        cast = only_user(attention.outputs[0], "Cast")  # in half precision
        self.results = [attention.outputs[0], *([] if cast is None else cast.outputs)]
        self.after = only_user(self.results[-1], "Transpose")
        known = {attention}
        self.found = self.after is not None and _swaps(self.after)
        queue = list(attention.inputs[:3])
        while queue and self.found:
            node = queue.pop().producer()
            if node in known:
                continue
            known.add(node)
            if node is not None and _swaps(node):
                self.transposes.append(node)
                continue
            through = None if node is None else _moved(node)
            if through is None:
                self.found = False
            else:
                self.nodes.append(node)
                queue += through
        made = [value for node in (*self.nodes, *self.transposes) for value in node.outputs]
        self.found &= all(not x.is_graph_output() and known.issuperset(users(x)) for x in made)

    def turn(self, graph: Any, tables: Tables) -> None:
        """Move the nodes before the Transposes, in place."""
        import onnx_ir as ir

        for node in self.nodes:
            if node.domain == FUSED_DOMAIN:
                _turn_tables(node, tables)
        for value in (*(x for node in self.nodes for x in node.outputs), *self.results):
            if value.shape is not None:
                value.shape = ir.Shape([value.shape[axis] for axis in _SWAPPED])
        for node in self.transposes:
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            graph.remove(node, safe=True)
        self.attention.attributes["perm"] = ir.AttrInt64s("perm", SEQUENCE_FIRST)
        result, after = self.results[-1], self.after
        if after.outputs[0].is_graph_output():
            result.name = after.outputs[0].name
        ir.convenience.replace_all_uses_with(after.outputs[0], result, replace_graph_outputs=True)
        graph.remove(after, safe=True)


def _swaps(node: Any) -> bool:
    """Return whether a node is the Transpose between `[B, H, N, D]` and `[B, N, H, D]`."""
    return node.op_type == "Transpose" and node.domain == "" and tuple(attribute(node, "perm", ())) == _SWAPPED


def _moved(node: Any) -> list[Any] | None:
    """List the inputs whose Transposes a node would be moved before; None for a node that depends on the layout."""
    if node.domain == FUSED_DOMAIN:
        return [node.inputs[0]] if node.op_type in ROTATIONS else None
    if node.domain:
        return None
    if node.op_type in _BY_ELEMENT:
        inputs = [value for value in node.inputs if not _same_in_both(value)]
        return inputs if all(_rank(value) == 4 for value in inputs) else None
    last = [-1, 3]
    if node.op_type == "ReduceMean":
        axes = integers(node.inputs[1]) if len(node.inputs) > 1 else attribute(node, "axes", None)
        return [node.inputs[0]] if axes and axes[0] in last and attribute(node, "keepdims", 1) else None
    if node.op_type == "Concat":
        return list(node.inputs) if attribute(node, "axis", 0) in last else None
    if node.op_type in ("Slice", "Split"):
        cut = cut_of(node.outputs[0])
        return [node.inputs[0]] if cut is not None and cut.axis == 3 and _rank(node.inputs[0]) == 4 else None
    return None


def _rank(value: Any) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def _same_in_both(value: Any) -> bool:
    """Return whether a value broadcasts equally with both layouts: at most one axis, or only the last and the first."""
    if value is None or value.shape is None:
        return False
    return len(value.shape) <= 1 or (len(value.shape) == 4 and list(value.shape)[1:3] == [1, 1])


def _turn_tables(node: Any, tables: Tables) -> None:
    """Give a rotation of `[B, H, N, D]` the tables of `[B, N, H, D]`."""
    for place in (1, 2):
        node.replace_input_with(place, tables.turned(node.inputs[place], pairs=node.op_type == PAIRS))
