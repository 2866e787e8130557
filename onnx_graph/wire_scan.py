"""Scan an ONNX file's bytes once: its operators, its size after inlining, and where its weights lie.

The bytes are read as protobuf's wire format, without weights and without another package, so that hostile files are
refused before protobuf or an engine spends memory or time on them. Field numbers are those of onnx/onnx.proto3, the
same since IR version 8.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The largest exported models have about ten thousand nodes.
MOST_NODES = 1 << 20
# A graph inside a graph is three messages deeper: node, attribute, graph. Protobuf itself reads no more than 100.
_DEEPEST = 256

# Fields of each message that are messages and may lead to nodes, or to tensors and the places of their data.
_INNER: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 25: "Function"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
}
# The fields that hold an operator's or function's domain and name, and an entry's key and value.
_NAMES: dict[str, tuple[int, int]] = {"Node": (7, 4), "Function": (10, 1), "Entry": (1, 2)}

Data = mmap.mmap | bytes
# Domain and type of operators.
Operators = frozenset[tuple[str, str]]
_Span = tuple[int, int]
_Calls = Counter[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Scan:
    """Result of the scan.

    Args:
        operators: domain and type of the nodes in the graph and in functions.
        inlined_nodes: nodes of the graph after inlining; any number above `MOST_NODES` where functions call each other
            in a circle, or too often.
        locations: where external data lies, as the file says it.
    """

    operators: Operators = frozenset()
    inlined_nodes: int = 0
    locations: frozenset[str] = frozenset()


def scan(data: Data) -> Scan:
    """Scan the bytes of a model; nothing is found in other bytes, which are left to the code that opens them."""
    walk = _Walk(data)
    try:
        walk.message("Model", (0, len(data)), 0, walk.graph)
    except ValueError:
        return Scan()
    names = {key for calls in (walk.graph, *walk.functions.values()) for key in calls}
    operators = frozenset((_text(domain), _text(op_type)) for domain, op_type in names)
    return Scan(operators, _inlined(walk.graph, walk.functions), frozenset(walk.locations))


def lies_inside(location: str) -> bool:
    """Check that a place of external data is in its model's folder or below it; ONNX allows no other."""
    return bool(location) and not Path(location).is_absolute() and ".." not in Path(location).parts


class _Walk:
    """Reader of the messages of a model.

    Attributes:
        graph: how often each operator stands in the graph, graphs inside its nodes included.
        functions: the same for each function, by domain and name.
        locations: places of external data.
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        self.graph: _Calls = Counter()
        self.functions: dict[tuple[bytes, bytes], _Calls] = {}
        self.locations: set[str] = set()

    def message(self, kind: str, span: _Span, depth: int, calls: _Calls) -> None:
        """Read a message and those inside it, and count its nodes in `calls`.

        Raises:
            ValueError: the bytes are not those of a model.
        """
        if depth > _DEEPEST:
            raise ValueError("graphs in graphs, too deep for protobuf")
        own: _Calls = Counter() if kind == "Function" else calls
        inner, names = _INNER.get(kind, {}), _NAMES.get(kind, ())
        found: dict[int, bytes] = {}
        for number, (start, end) in _fields(self._data, span):
            if number in inner:
                self.message(inner[number], (start, end), depth + 1, own)
            elif number in names:
                found[number] = self._data[start:end]
        first, second = (found.get(number, b"") for number in names or (0, 0))
        if kind == "Node":
            calls[first, second] += 1
        elif kind == "Function":
            self.functions[first, second] = own
        elif kind == "Entry" and first == b"location":
            self.locations.add(_text(second))


def _inlined(graph: _Calls, functions: dict[tuple[bytes, bytes], _Calls]) -> int:
    """Count the nodes of the graph after inlining, as `Scan.inlined_nodes`."""
    sizes: dict[tuple[bytes, bytes], int] = {}
    left = set(functions)
    while left:
        ready = [key for key in left if not left & functions[key].keys()]
        if not ready:  # the functions that are left call themselves, perhaps by way of others
            return MOST_NODES + 1 if left & graph.keys() else _size(graph, sizes)
        for key in ready:
            sizes[key] = min(_size(functions[key], sizes), MOST_NODES + 1)
        left.difference_update(ready)
    return _size(graph, sizes)


def _size(calls: _Calls, sizes: dict[tuple[bytes, bytes], int]) -> int:
    return sum(count * max(1, sizes.get(key, 1)) for key, count in calls.items())


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _fields(data: Data, span: _Span) -> Iterator[tuple[int, _Span]]:
    """Yield number and span of each field that has a length; others are skipped, groups with their content.

    Source: protobuf.dev, "Encoding". ONNX has no groups, but protobuf skips unknown ones.
    """
    at, end = span
    groups: list[int] = []
    while at < end:
        tag, at = _varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            _, at = _varint(data, at, end)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            length, at = _varint(data, at, end)
            if length > end - at:
                raise ValueError("cut")
            if not groups:
                yield number, (at, at + length)
            at += length
        elif kind == 3:
            groups.append(number)
        elif kind != 4 or not groups or groups.pop() != number:
            raise ValueError("no protobuf message")
    if groups:
        raise ValueError("cut")


def _varint(data: Data, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError("cut")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number too long")
