"""Infer constructor arguments from tensor shapes: the functions that every family's `infer.py` uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...core.errors import UsageError

Shape = tuple[int, ...]
# Name of a tensor in a state dict → its shape.
TensorShapes = dict[str, Shape]

INV_FREQ = "rel_pos.inv_freq"


@dataclass(frozen=True)
class Inferred:
    """A value of one argument, with the tensor that shows it.

    Args:
        value: value of the argument.
        key: the entry of the state dict, present or absent, that shows the value.
        how: an explanation in words.
    """

    value: Any
    key: str
    how: str


# By the argument's name.
Findings = dict[str, Inferred]


def bounded(names: list[str], limit: int = 10) -> str:
    """Join the first names, and say how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(name[:100] for name in names[:limit]) + more


def size_of(shapes: TensorShapes, key: str, axes: int, axis: int) -> int:
    """Return one size of a tensor that must be present with that many axes.

    Raises:
        UsageError: no such tensor, or it has another number of axes.
    """
    shape = shapes.get(key)
    if shape is None:
        raise UsageError(
            f"The checkpoint has no {key}.",
            why="The other sizes follow from it.",
            fix="Save the whole state dict of the model.",
        )
    if len(shape) != axes:
        raise UsageError(f"{key} is {list(shape)}.", why=f"It has {axes} axes in every supported model.")
    return shape[axis]


def from_size(shapes: TensorShapes, key: str, axes: int, axis: int, per_unit: int = 1) -> Inferred:
    """Infer an argument that is `per_unit` times one size of a tensor.

    Raises:
        UsageError: see `size_of`.
    """
    value = size_of(shapes, key, axes, axis) * per_unit
    return Inferred(value, key, f"{key} is {list(shapes[key])}")


def from_presence(shapes: TensorShapes, key: str) -> Inferred:
    """Infer a flag from whether a tensor is present."""
    present = key in shapes
    return Inferred(present, key, f"{key} is {'present' if present else 'absent'}")
