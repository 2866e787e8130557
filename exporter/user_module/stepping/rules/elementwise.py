"""Operators that compute each entry from the entries at its place: they need no earlier position.

Two values of which one begins earlier, as after left padding, meet with a delay: the later one waits in a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..along import Along, CannotStep, tensors_of
from ..plan import At, Call, Execute


def elementwise(at: At) -> tuple[Any, Execute]:
    """Compute an operator of values that are broadcast against each other."""
    result = at.result()
    along: Along = result if isinstance(result, Along) else result[0]
    from_end = at.rank(at.node) - along.axis if isinstance(result, Along) else 0
    pre = together(at, from_end)
    operands: dict[str, Callable[[Call], Any]] = {}
    for name, value in at.given.items():
        if isinstance(value, fx.Node):
            axis = at.rank(value) - from_end if tensors_of(value) else None
            operands[name] = at.operand(value, pre, axis)
        elif isinstance(value, list | tuple) and any(isinstance(x, fx.Node) for x in value):
            raise CannotStep("it combines a list of values")
    return Along(along.axis, pre), at.run(operands)


def together(at: At, from_end: int) -> int:
    """Return the fewest entries before position 0 of the values that are combined.

    Args:
        at: the node.
        from_end: the place of the time axis of the result, counted from the end.

    Raises:
        CannotStep: the positions of two of them are not at the same place.
    """
    pres = []
    for x, along in at.moving():
        if at.rank(x) - along.axis != from_end:
            raise CannotStep("it combines each position with all positions")
        pres.append(along.pre)
    return min(pres)


def cast_like(at: At) -> tuple[Any, Execute]:
    """Return a value in another element type."""
    x, along = at.value()
    dtype = tensors_of(at.node)[0].dtype
    return at.result(along.pre), lambda call: call.values[x].to(dtype)


def halves(at: At) -> tuple[Any, Execute]:
    """Compute a gated unit of the two halves of an axis other than time."""
    value = at.given["self"]
    along = at.along(value)
    assert along is not None
    if at.given["dim"] % at.rank(value) == along.axis:
        raise CannotStep("it halves the sequence")
    return Along(along.axis, along.pre), at.run({"self": lambda call: call.values[value]})


def is_elementwise(node: fx.Node) -> bool:
    """Return whether PyTorch says that an operator works on each entry by itself."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
