"""Norms, softmax and sums over axes other than time; over time they need the whole sequence.

BatchNorm of a module in evaluation mode multiplies by numbers of its training.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..along import Along, CannotStep
from ..plan import At, Call, Execute, name_of


def _run(at: At, x: fx.Node) -> Execute:
    operands: dict[str, Any] = {}
    for name, value in at.given.items():
        if value is x:
            operands[name] = lambda call: call.values[x]
        elif isinstance(value, fx.Node):
            operands[name] = at.operand(value, 0)
    return at.run(operands)


def _result(at: At, along: Along) -> Any:
    return at.result(along.pre)


def over_axes(at: At) -> tuple[Any, Execute]:
    """Reduce or normalise over the axes in `dim`."""
    x, along = at.value()
    given = at.given.get("dim")
    dims = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if not dims or along.axis in [dim % at.rank(x) for dim in dims]:
        raise CannotStep(f"{name_of(at.node)} over time needs the whole sequence")
    return _result(at, along), _run(at, x)


def over_last(at: At) -> tuple[Any, Execute]:
    """Normalise over the last axes."""
    x, along = at.value()
    if along.axis >= at.rank(x) - len(at.given["normalized_shape"]):
        raise CannotStep("it normalises over time, which needs the whole sequence")
    return _result(at, along), _run(at, x)


def by_channel(at: At) -> tuple[Any, Execute]:
    """Apply BatchNorm in evaluation mode."""
    x, along = at.value()
    if at.given["training"]:
        raise CannotStep("it normalises over the batch and time: the module is in training mode")
    if along.axis == 1:
        raise CannotStep("its channels are the positions")
    return _result(at, along), _run(at, x)


def over_everything(at: At) -> tuple[Any, Execute]:
    """Refuse a norm or a sum over all positions."""
    raise CannotStep(f"{name_of(at.node)} over time needs the whole sequence")


def running(at: At) -> tuple[Any, Execute]:
    """Sum over all positions up to each, with the sum so far in a cache; or over another axis."""
    x, along = at.value()
    if at.given["dim"] % at.rank(x) != along.axis:
        return _result(at, along), _run(at, x)
    if along.pre:
        raise CannotStep("it sums what comes before the first position")
    result = at.result()
    shape = [1 if axis == along.axis else size.of_call(1) for axis, size in enumerate(at.sizes(at.node))]
    cache = at.cache(shape, at.node.meta["val"].dtype, 0.0)

    def execute(call: Call) -> Any:
        found = call.values[x].cumsum(along.axis) + call.caches[cache.name]
        call.kept[cache.name] = found.narrow(along.axis, call.chunk - 1, 1)
        return found

    return result, execute
