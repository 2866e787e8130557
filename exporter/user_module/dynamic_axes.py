"""Refuse axes that cannot be dynamic before anything is traced, by running the module at another size of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ...core.error_texts import argument, named_line
from ...core.errors import UsageError
from .inputs import Arrays, ModuleInput, axis_sizes, call, draw_all

# Runs that one axis may cost; a module that refuses a size refuses it at once.
_MOST_TRIALS = 16


def check_dynamic_axes(
    module: nn.Module, inputs: Sequence[ModuleInput], by_name: bool, dynamic: Sequence[str], *, guessed: bool
) -> None:
    """Run the module at another size of every dynamic axis.

    Args:
        module: the user's, untouched.
        inputs: the inputs, with names for their axes.
        by_name: whether inputs go in by name.
        dynamic: names of axes.
        guessed: whether the names are the default ones: batch for the first axis, seq for the second.

    Raises:
        UsageError: the module accepts no other size of an axis.
    """
    sizes = axis_sizes(inputs)
    for axis in dynamic:
        why = _refusal(module, inputs, by_name, sizes, axis)
        if why is None:
            continue
        first = next(x for x in inputs if axis in x.axes)
        raise UsageError(
            f"{argument('dynamic')} names {axis!r}: the module takes no other size than {sizes[axis]} "
            f"on axis {first.axes.index(axis)} of {first.spec().describe()}.",
            why=f"{'That axis is taken for it where none has a name. ' if guessed else ''}{why}",
            fix=_named(module, inputs, by_name, sizes, axis)
            if guessed
            else f"Leave {axis} out of {argument('dynamic')}.",
        )


def _refusal(
    module: nn.Module, inputs: Sequence[ModuleInput], by_name: bool, sizes: Mapping[str, int], axis: str
) -> str | None:
    """Return why the module accepts no other size of an axis.

    None if it accepts one, or if it does not even accept the given sizes.
    """
    if _runs(module, draw_all(inputs, 0, sizes), by_name):
        return None  # the run that follows raises its error
    first = ""  # the error at the first size tried
    for size in _other_sizes(sizes[axis]):
        why = _runs(module, draw_all(inputs, 0, {**sizes, axis: size}), by_name)
        if not why:
            return None
        first = first or f"With {size} there: {why}"
    return first


def _other_sizes(size: int) -> list[int]:
    """List sizes to try: the next ones, twice and half the size, and multiples of numbers that may divide it."""
    divisors = [d for d in range(size // 2, 1, -1) if size % d == 0]
    tried = [size + 1, size - 1, 2 * size, size // 2, *(size - d for d in divisors), *(size + d for d in divisors)]
    return [n for n in dict.fromkeys(tried) if n > 0 and n != size][:_MOST_TRIALS]


def _runs(module: nn.Module, arrays: Arrays, by_name: bool) -> str:
    """Run the module on these inputs, and return the error it raises; "" if none."""
    try:
        call(module, arrays, by_name)
    except Exception as error:  # the user's module may raise anything
        return named_line(error, 200)
    return ""


def _named(module: nn.Module, inputs: Sequence[ModuleInput], by_name: bool, sizes: Mapping[str, int], axis: str) -> str:
    """Suggest how to name the axes, from those of the first input that the module accepts at other sizes."""
    first = inputs[0]
    places = [place for place in range(len(first.shape)) if first.axes[place] in ("", axis)]
    for place in sorted(places, key=lambda place: -first.shape[place]):
        names = tuple(axis if at == place else "" if name == axis else name for at, name in enumerate(first.axes))
        renamed = [ModuleInput(first.name, first.dtype, first.shape, names, first.limit), *inputs[1:]]
        others = {name: size for name, size in sizes.items() if name != axis}
        if _refusal(module, renamed, by_name, {**others, axis: first.shape[place]}, axis) is None:
            return f"Name the axes: {as_option(renamed[0])}."
    other = f"or leave {axis} out of {argument('dynamic')}"
    return f"Name the axes as they are, for instance {as_option(first)}, {other}."


def as_option(x: ModuleInput, second: str = "") -> str:
    """Write an input with the names of its axes, in the form of `--input`; `second` names its second axis."""
    names = [second if place == 1 and second else name for place, name in enumerate(x.axes)]
    axes = (f"{name}={size}" if name else str(size) for size, name in zip(x.shape, names, strict=True))
    return f'--input "{x.name}:{x.dtype}:[{",".join(axes)}]"'
