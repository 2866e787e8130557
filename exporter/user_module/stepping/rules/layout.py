"""Operators that arrange entries otherwise: axes are reshaped, exchanged, cut and joined.

Sizes are those that the exporter states for the result, with the call's positions in place of the sequence. Along time
only the ends of a sequence are cut and padded, which moves its beginning; a call is as it was.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..along import Along, CannotStep, Size, tensors_of, time_axes
from ..plan import At, Call, Execute
from .elementwise import together


def reshape(at: At) -> tuple[Any, Execute]:
    """Give a value other axes in the same order."""
    x, along = at.value()
    result = at.result(along.pre)
    before, after = at.sizes(x), at.sizes(at.node)
    if _product(before[: along.axis]) != _product(after[: result.axis]):
        raise CannotStep("it joins the positions of several sequences, or cuts the sequence into parts")
    return result, lambda call: call.values[x].reshape([size.of_call(call.chunk) for size in after])


def _product(sizes: list[Size]) -> int:
    return math.prod(size.rest for size in sizes)


def expand(at: At) -> tuple[Any, Execute]:
    """Repeat a value along axes of one entry; a constant also along time."""
    x = at.given["self"]
    along = at.along(x)
    pre = max(found.pre for _, found in at.moving())
    result = at.result(pre)
    if along is not None and at.rank(at.node) - result.axis != at.rank(x) - along.axis:
        raise CannotStep("it repeats the sequence")
    sizes = at.sizes(at.node)
    operand = at.operand(x, pre, at.rank(x) - at.rank(at.node) + result.axis)
    return result, lambda call: operand(call).expand([size.of_call(call.chunk) for size in sizes])


def permute(at: At) -> tuple[Any, Execute]:
    """Exchange axes."""
    x, along = at.value()
    result = at.result(along.pre)
    return result, at.run({"self": lambda call: call.values[x]})


def keep(at: At) -> tuple[Any, Execute]:
    """Return a value as it is: dropout of a module in evaluation mode, copies."""
    x, along = at.value()
    if at.given.get("train") or at.given.get("training"):
        raise CannotStep("it drops entries at random: the module is in training mode")
    return at.result(along.pre), lambda call: call.values[x]


def join(at: At) -> tuple[Any, Execute]:
    """Join values on an axis other than time; constants joined before a sequence pad it."""
    parts = list(at.given["tensors"])
    rank = at.rank(at.node)
    dim = at.given["dim"] % rank
    result = at.result()
    if dim == result.axis:
        raise CannotStep("it joins other values to the sequence")
    from_end = rank - result.axis
    pre = together(at, from_end)
    operands = [at.operand(x, pre, at.rank(x) - from_end if isinstance(x, fx.Node) else None) for x in parts]
    shapes = [at.sizes(x) for x in parts]

    def execute(call: Call) -> Any:
        sizes = [[size.of_call(call.chunk) for size in shape] for shape in shapes]
        return torch.cat([operand(call).expand(size) for operand, size in zip(operands, sizes, strict=True)], dim)

    return Along(result.axis, pre), execute


def stack(at: At) -> tuple[Any, Execute]:
    """Join values on a new axis."""
    parts = list(at.given["tensors"])
    result = at.result()
    dim = at.given["dim"] % at.rank(at.node)
    axis = result.axis - (dim < result.axis)
    pre = together(at, at.rank(parts[0]) - axis)
    operands = [at.operand(x, pre, axis) for x in parts]
    sizes = at.sizes(parts[0])

    def execute(call: Call) -> Any:
        shape = [size.of_call(call.chunk) for size in sizes]
        return torch.stack([operand(call).expand(shape) for operand in operands], dim)

    return Along(result.axis, pre), execute


def cut(at: At) -> tuple[Any, Execute]:
    """Cut a value on an axis into parts, none of them of the sequence."""
    x, along = at.value()
    rank = at.rank(x)
    if at.given["dim"] % rank == along.axis:
        raise CannotStep("it cuts the sequence into parts")
    return at.result(along.pre), at.run({"self": lambda call: call.values[x]})


def part_of(at: At) -> tuple[Any, Execute]:
    """Return one of several results of an operator."""
    source, index = at.node.args
    found = at.plan.along[source][index]  # type: ignore[index]
    return found, lambda call: call.values[source][index]  # type: ignore[index]


def select(at: At) -> tuple[Any, Execute]:
    """Take one entry of an axis other than time."""
    x, along = at.value()
    if at.given["dim"] % at.rank(x) == along.axis:
        raise CannotStep("it takes one position of the sequence")
    return at.result(along.pre), at.run({"self": lambda call: call.values[x]})


def pick(at: At) -> tuple[Any, Execute]:
    """Take some entries of an axis other than time, by constant numbers."""
    x, along = at.value()
    if at.given["dim"] % at.rank(x) == along.axis:
        raise CannotStep("it takes positions in another order")
    index = at.operand(at.given["index"], 0)
    return at.result(along.pre), at.run({"self": lambda call: call.values[x], "index": index})


def slice_(at: At) -> tuple[Any, Execute]:
    """Take a part of an axis; of the sequence, all but some of its beginning or end."""
    x, along = at.value()
    if at.given["dim"] % at.rank(x) != along.axis:
        return at.result(along.pre), at.run({"self": lambda call: call.values[x]})
    start = at.given["start"] or 0
    if not time_axes(tensors_of(at.node)[0]) or not isinstance(start, int) or start < 0:
        raise CannotStep("it takes fixed positions of the sequence")
    if at.given["step"] != 1:
        raise CannotStep("it takes every so-many-th position")
    return at.result(_moved(along, -start)), lambda call: call.values[x]


def _moved(along: Along, by: int) -> int:
    """Return the entries before position 0 after the beginning has moved by some."""
    pre = along.pre + by
    if pre < 0:
        raise CannotStep("it drops the first positions, so that each output depends on later ones")
    return pre


def pad(at: At) -> tuple[Any, Execute]:
    """Pad a value; on the left of the sequence with a number."""
    x, along = at.value()
    sizes, mode, value = list(at.given["pad"]), at.given.get("mode", "constant"), at.given.get("value") or 0.0
    place = 2 * (at.rank(x) - 1 - along.axis)
    sizes += [0] * (place + 2 - len(sizes))
    left = sizes[place]
    if not isinstance(left, int):
        raise CannotStep("it pads the sequence by a number that depends on its length")
    if left and mode != "constant":
        raise CannotStep(f"it pads the sequence by its own entries ({mode})")
    pre = _moved(along, left)
    others = [0 if n in (place, place + 1) else size for n, size in enumerate(sizes)]

    def execute(call: Call) -> Any:
        return torch.nn.functional.pad(call.values[x], others, mode, value) if any(others) else call.values[x]

    if left <= 0:
        return at.result(pre), execute
    before = None
    shape = [size.of_call(1) for size in at.sizes(at.node)]
    padding = torch.full(shape, value, dtype=tensors_of(at.node)[0].dtype)
    if not along.pre or (along.before is not None and torch.equal(along.before.expand(shape), padding)):
        before = padding
    return at.result(pre, before, alone=False), execute


def reorder(at: At) -> tuple[Any, Execute]:
    """Refuse what changes the order of positions, and allow the same on other axes."""
    x, along = at.value()
    dims = at.given.get("dims", at.given.get("dim"))
    axes = [d % at.rank(x) for d in (dims if isinstance(dims, list | tuple) else [dims]) if isinstance(d, int)]
    if not axes or along.axis in axes:
        raise CannotStep("it changes the order of the positions")
    return at.result(along.pre), at.run({"self": lambda call: call.values[x]})
