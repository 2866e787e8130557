"""Causal convolutions: a cache keeps the entries that the kernel sees before a call's first position.

The output at index `j` reads the inputs from `j - padding` to `j - padding + dilation·(k - 1)`. Taken as that of the
last one's position, it begins `padding - dilation·(k - 1)` entries before the input. Where that is below 0 the first
outputs are missing, and those at their place depend on later positions.
"""

from __future__ import annotations

from typing import Any

from ..along import Along, CannotStep
from ..plan import At, Call, Execute


def _per_axis(given: Any, count: int) -> list[int]:
    values = [given] if isinstance(given, int) else list(given)
    return values * count if len(values) == 1 else values


def convolution(at: At) -> tuple[Any, Execute]:
    """Convolve along time and other axes."""
    x, weight = at.given["input"], at.given["weight"]
    along = at.along(x)
    if along is None or at.along(weight) is not None:
        raise CannotStep("its kernel depends on the inputs")
    if at.given.get("transposed"):
        raise CannotStep("a transposed convolution makes several positions of one")
    spatial = at.rank(weight) - 2
    place = along.axis - (at.rank(x) - spatial)
    operands: dict[str, Any] = {name: at.operand(at.given[name], 0) for name in ("weight", "bias")}
    if place < 0:
        if along.axis:
            raise CannotStep("its channels are the positions")
        return at.result(along.pre), at.run({"input": lambda c: c.values[x], **operands})
    kernel = at.sizes(weight)[2 + place].rest
    stride, dilation = (_per_axis(at.given[name], spatial) for name in ("stride", "dilation"))
    if stride[place] != 1:
        raise CannotStep(f"its stride of {stride[place]} makes one position of several")
    reach = dilation[place] * (kernel - 1)
    padding = _padding(at.given["padding"], kernel, dilation, spatial, place, at)
    pre = along.pre + padding[place] - reach
    if pre < 0:
        missing = -pre
        raise CannotStep(
            f"its output at a position depends on {missing} later one{'s' if missing > 1 else ''}: the kernel of "
            f"{kernel} needs {reach} entries of padding on the left, and has {along.pre + padding[place]}"
        )
    result: Along = at.result(pre, alone=False)
    inner = [0 if axis == place else size for axis, size in enumerate(padding)]
    if not reach:
        return result, at.run({"input": lambda call: call.values[x], **operands}, padding=inner)
    cache = at.history(x, reach, padded=bool(padding[place]))
    run = at.run({"input": lambda call: call.keep_last(cache, along.axis, call.values[x]), **operands}, padding=inner)

    def execute(call: Call) -> Any:
        return run(call)

    return result, execute


def _padding(given: Any, kernel: int, dilation: list[int], spatial: int, place: int, at: At) -> list[int]:
    """Return the padding on the left of each axis."""
    if given == "valid":
        return [0] * spatial
    if given == "same":
        raise CannotStep(
            f"padding='same' puts half of the {dilation[place] * (kernel - 1)} entries on the right: each output "
            "depends on later positions"
        )
    return _per_axis(given, spatial)
