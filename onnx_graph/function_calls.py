"""How many nodes an ONNX file becomes when its functions are inlined, told before an engine inlines them.

A few functions that call each other twice stand for any number of nodes, and an engine would not come back.
"""

from __future__ import annotations

import mmap
from collections import Counter
from pathlib import Path

from ..core.errors import UsageError
from .loops import LOOP, check_loops
from .wire_format import DEEPEST_GRAPH, Data, Span, fields

# The largest exported models have some ten thousand.
MOST_NODES = 1 << 20

# Field numbers of onnx.proto (onnx/onnx.proto3, the same since IR version 8).
_MODEL_GRAPH, _MODEL_FUNCTIONS = 7, 25
_GRAPH_NODE = 1
_FUNCTION_NAME, _FUNCTION_NODE, _FUNCTION_DOMAIN = 1, 7, 10
_NODE_OP_TYPE, _NODE_ATTRIBUTE, _NODE_DOMAIN = 4, 5, 7
_ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS = 6, 11

_Key = tuple[bytes, bytes]

# Domain and type of operators.
Operators = frozenset[tuple[str, str]]


def check_calls(path: Path) -> Operators:
    """Refuse a file whose functions call each other in a circle, or become more nodes than any model has; or whose
    loops have no end (`onnx_loops`).

    Returns:
        Domain and type of the nodes in the graph and its functions. What is no ONNX file has none: it is left to
        whoever opens it.

    Raises:
        UsageError: it is one of these.
    """
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            total, operators = _expanded(data)
    except (OSError, ValueError):
        return frozenset()
    if total > MOST_NODES:
        raise UsageError(
            f"{path} cannot be loaded.",
            why=f"Its functions call each other so often that it would become more than {MOST_NODES} nodes.",
            fix="Export the model again; this file was not made by an exporter.",
        )
    if any(op_type == LOOP for _, op_type in operators):
        check_loops(path)
    return operators


def operators_of(model: bytes) -> Operators:
    """The same of a model in memory, which is not judged."""
    try:
        return _expanded(model)[1]
    except ValueError:
        return frozenset()


def _expanded(data: Data) -> tuple[int, Operators]:
    """Nodes of the graph after inlining, or more than `MOST_NODES` for a circle; and which operators they are.

    Raises:
        ValueError: the bytes are not those of a model.
    """
    calls: dict[_Key, Counter[_Key]] = {}
    graph: Counter[_Key] = Counter()
    for number, span in fields(data, (0, len(data))):
        if number == _MODEL_GRAPH:
            graph += _nodes(data, span, _GRAPH_NODE, 0)
        elif number == _MODEL_FUNCTIONS:
            inner = {field: data[start:end] for field, (start, end) in fields(data, span) if field in (1, 10)}
            key = (inner.get(_FUNCTION_DOMAIN, b""), inner.get(_FUNCTION_NAME, b""))
            calls[key] = _nodes(data, span, _FUNCTION_NODE, 0)
    operators = frozenset((_text(d), _text(op)) for counts in (graph, *calls.values()) for d, op in counts)
    sizes: dict[_Key, int] = {}
    left = set(calls)
    while left:
        ready = [key for key in left if not left & calls[key].keys()]
        if not ready:
            return (MOST_NODES + 1 if left & graph.keys() else _size(graph, sizes)), operators
        for key in ready:
            sizes[key] = min(_size(calls[key], sizes), MOST_NODES + 1)
        left.difference_update(ready)
    return _size(graph, sizes), operators


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _size(called: Counter[_Key], sizes: dict[_Key, int]) -> int:
    return sum(count * max(1, sizes.get(key, 1)) for key, count in called.items())


def _nodes(data: Data, span: Span, node_field: int, depth: int) -> Counter[_Key]:
    """How often each operator stands in a graph or function, graphs inside its nodes included."""
    if depth > DEEPEST_GRAPH:
        raise ValueError("graphs in graphs, too deep for protobuf")
    found: Counter[_Key] = Counter()
    for number, node in fields(data, span):
        if number != node_field:
            continue
        names = {_NODE_OP_TYPE: b"", _NODE_DOMAIN: b""}
        for field, (start, end) in fields(data, node):
            if field in names:
                names[field] = data[start:end]
            elif field == _NODE_ATTRIBUTE:
                for kind, inner in fields(data, (start, end)):
                    if kind in (_ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS):
                        found += _nodes(data, inner, _GRAPH_NODE, depth + 1)
        found[names[_NODE_DOMAIN], names[_NODE_OP_TYPE]] += 1
    return found
