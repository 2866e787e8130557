"""Refuse ONNX files with loops that would practically never end, as far as their constants tell.

A Loop has an input for the most rounds, and its subgraph says after each round whether to continue. Where neither
depends on inputs of the model or computed values, the rounds are known before anything runs (ONNX, operator Loop). A
Scan takes as many rounds as its inputs are long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import UsageError
from .graph_values import graphs_of

LOOP = "Loop"
# onnxruntime takes half a microsecond for a node that does next to nothing: half an hour in all.
MOST_RUNS = 1 << 32
_ENDLESS = (1 << 63) - 1  # rounds of a Loop without a count
_STANDARD = ("", "ai.onnx")
_LONGEST_CHAIN = 1000
_Value = int | bool | None


def check_loops(model: Any, name: str) -> None:
    """Refuse a model whose loops have no end, or would run for longer than anyone waits.

    Args:
        model: the `onnx.ModelProto`.
        name: its name in errors.

    Raises:
        UsageError: it is such a model.
    """
    runs = _Runs({(_domain(body), body.name): body for body in model.functions})
    try:
        total = runs.of(model.graph, _Scope(model.graph, None))
    except RecursionError:  # functions in functions, deeper than anyone writes them
        return
    if total > MOST_RUNS:
        worst = runs.worst
        raise UsageError(
            f"{name} cannot be loaded.",
            why=f"Its loops run more than {MOST_RUNS} nodes" + (f", most of them in {worst!r}." if worst else "."),
            fix="Give the Loop a count or a condition that ends it, or export the model again.",
        )


class _Scope:
    """The names of a graph, or of a function, and what is constant among them.

    Args:
        graph: the graph or function.
        outer: the graph it is in.
        known: names whose values are known besides.
    """

    def __init__(self, graph: Any, outer: _Scope | None, known: Mapping[str, _Value] | None = None) -> None:
        self._outer = outer
        self._known = dict(known or {})
        self._nodes = {name: node for node in graph.node for name in node.output}
        self._tensors = {tensor.name: tensor for tensor in getattr(graph, "initializer", ())}
        # A function's inputs are names, a graph's are values.
        self._fed = {getattr(entry, "name", entry) for entry in graph.input}

    def value(self, name: str) -> _Value:
        """Return the number or flag that a name has at every run; None where that is not known."""
        scope: _Scope | None = self
        for _ in range(_LONGEST_CHAIN):
            if scope is None:
                return None
            if name in scope._known:
                return scope._known[name]
            if name in scope._tensors:
                return _scalar(scope._tensors[name])
            node = scope._nodes.get(name)
            if node is None:
                if name in scope._fed:
                    return None
                scope = scope._outer
            elif node.op_type == "Identity" and node.input:
                name = node.input[0]
            else:
                return _constant(node)
        return None


class _Runs:
    """Counter of the nodes that run.

    Args:
        functions: those of the model by domain and name, none of which calls itself.
    """

    def __init__(self, functions: Mapping[tuple[str, str], Any]) -> None:
        self._functions = functions
        self._known: dict[tuple[str, str], int] = {}
        self.worst = ""
        self._most = 0

    def of(self, graph: Any, scope: _Scope) -> int:
        """Count the nodes that run when a graph or function runs once."""
        return sum(self._of_node(node, scope) for node in graph.node)

    def _of_node(self, node: Any, scope: _Scope) -> int:
        key = (_domain(node), node.op_type)
        if key in self._functions:
            if key not in self._known:
                body = self._functions[key]
                self._known[key] = self.of(body, _Scope(body, None))
            return self._known[key]
        inner = list(graphs_of(node))
        if key == ("", LOOP) and len(inner) == 1:
            return self._of_loop(node, inner[0], scope)
        return 1 + sum(self.of(graph, _Scope(graph, scope)) for graph in inner)

    def _of_loop(self, node: Any, body: Any, scope: _Scope) -> int:
        count, goes_on = (*node.input, "", "")[:2]
        # The subgraph gets the flag of the first round; if it then continues again, it always does.
        first = scope.value(goes_on) if goes_on else True
        fed = {body.input[1].name: first} if len(body.input) > 1 else {}
        inside = _Scope(body, scope, fed)
        rounds = 1
        if first and body.output and inside.value(body.output[0].name):
            most = scope.value(count) if count else _ENDLESS
            rounds = 1 if most is None else max(0, most)
        total = 1 + rounds * self.of(body, inside)
        if total > self._most:
            self._most, self.worst = total, node.name
        return total


def _domain(entry: Any) -> str:
    return "" if entry.domain in _STANDARD else str(entry.domain)


def _constant(node: Any) -> _Value:
    """Return the value of a Constant of one number; None for anything else."""
    if node.op_type != "Constant" or node.domain not in _STANDARD:
        return None
    for attribute in node.attribute:
        if attribute.name == "value_int":
            return int(attribute.i)
        if attribute.name == "value":
            return _scalar(attribute.t)
    return None


def _scalar(tensor: Any) -> _Value:
    """Return the value of a tensor of one integer or flag that lies in the file."""
    import onnx

    kinds = (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)
    if tensor.data_type not in kinds or any(size != 1 for size in tensor.dims) or tensor.external_data:
        return None
    try:
        value = onnx.numpy_helper.to_array(tensor).item()
    except (ValueError, TypeError):  # fewer bytes than its shape says
        return None
    return value if isinstance(value, (int, bool)) else None
