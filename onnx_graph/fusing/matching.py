"""Find patterns in a graph: constants, slices of a last axis, and users of a value."""

from __future__ import annotations

from typing import Any, NamedTuple


class Cut(NamedTuple):
    """Describe a value as a part `[start, end)` of one axis of another value."""

    source: Any
    axis: int
    start: int
    end: int


def maker(value: Any, *op_types: str) -> Any:
    """Return the node that computes a value if it is a standard operator of one of these types, else None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.domain == "" and node.op_type in op_types else None


def integers(value: Any) -> list[int] | None:
    """Return the integers of a constant of any shape; None if the value is not a constant."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return [int(x) for x in value.const_value.numpy().reshape(-1)]


def attribute(node: Any, name: str, default: Any) -> Any:
    """Return the value of an attribute, or the default where the node lacks it."""
    return node.attributes[name].value if name in node.attributes else default


def users(value: Any) -> list[Any]:
    """List the nodes that use a value, once for each use."""
    return [use.node for use in value.uses()]


def only_user(value: Any, op_type: str) -> Any:
    """Return the only node that uses a value if it is a standard operator of this type, else None."""
    nodes = users(value)
    if len(nodes) != 1 or value.is_graph_output() or nodes[0].domain or nodes[0].op_type != op_type:
        return None
    return nodes[0]


def static(value: Any, axis: int) -> int | None:
    """Return a static size of a value, or None."""
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def cut_of(value: Any) -> Cut | None:
    """Return the source of a value that a Split, or a Slice of one axis, made; None for every other value."""
    node = maker(value, "Slice", "Split")
    source = None if node is None else node.inputs[0]
    if source is None or source.shape is None:
        return None
    return _slice(node, source) if node.op_type == "Slice" else _split(node, value, source)


def _slice(node: Any, source: Any) -> Cut | None:
    starts, ends, axes = (integers(value) for value in node.inputs[1:4]) if len(node.inputs) > 3 else (None,) * 3
    steps = integers(node.inputs[4]) if len(node.inputs) > 4 else [1]
    if not starts or not ends or not axes or len(axes) != 1 or steps != [1]:
        return None
    axis = axes[0] % len(source.shape)
    size = static(source, axis)
    if size is None:
        return None
    start, end = (min(max(x + size if x < 0 else x, 0), size) for x in (starts[0], ends[0]))
    return Cut(source, axis, start, end)


def _split(node: Any, value: Any, source: Any) -> Cut | None:
    axis = attribute(node, "axis", 0) % len(source.shape)
    size, count = static(source, axis), len(node.outputs)
    if size is None:
        return None
    sizes = integers(node.inputs[1]) if len(node.inputs) > 1 else None
    if sizes is None:
        if len(node.inputs) > 1 or size % count:
            return None
        sizes = [size // count] * count
    index = list(node.outputs).index(value)
    start = sum(sizes[:index])
    return Cut(source, axis, start, start + sizes[index])
