"""Find the common inputs of two models: drawn once, in the coarser of their float types, and cast for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from ...core.errors import UsageError
from ...core.tensors import UNNAMED_DIMENSION, TensorSpec
from ..session import Arrays

# From coarse to fine, without bfloat16, which numpy lacks.
_FLOATS = ("float16", "float32", "float64")
# A size, or a dynamic axis: its model and its name.
_Axis = int | tuple[str, str]


def shared_specs(first: Sequence[TensorSpec], second: Sequence[TensorSpec], names: tuple[str, str]) -> list[TensorSpec]:
    """Join the inputs of two models.

    Args:
        first: the inputs of one model.
        second: the inputs of the other.
        names: of the models, for the error.

    Returns:
        The inputs in the order of the first. Where one model has a dynamic axis and the other a size, the size is
        taken; where both are dynamic, the first one's name. Of two float types it is the coarser.

    Raises:
        UsageError: a name, a type or a size differs; the text lists every difference.
    """
    one, other = ({spec.name: spec for spec in specs} for specs in (first, second))
    wrong = [f"Only {names[0]} has the input {one[name].describe()}." for name in one if name not in other]
    wrong += [f"Only {names[1]} has the input {other[name].describe()}." for name in other if name not in one]
    sizes = _Sizes()
    found = []
    for name in (name for name in one if name in other):
        a, b = one[name], other[name]
        dtype = _coarser(a.dtype, b.dtype)
        fits = dtype is not None and len(a.shape) == len(b.shape)
        joined = [sizes.join(x, y) for x, y in zip(_axes(names[0], a), _axes(names[1], b), strict=False)]
        if not (fits and all(joined)):
            wrong.append(f"Input {name!r} is {_described(a)} in {names[0]} and {_described(b)} in {names[1]}.")
        found.append(replace(a, dtype=dtype or a.dtype))
    if wrong:
        raise UsageError(
            f"{names[0]} and {names[1]} have different inputs.",
            why=" ".join(wrong),
            fix="Give two files of one model at the same sizes; a step file needs its sidecar.",
        )
    return [replace(spec, shape=tuple(sizes.of(x) for x in _axes(names[0], spec))) for spec in found]


def cast_to(arrays: Mapping[str, NDArray[Any]], specs: Iterable[TensorSpec]) -> Arrays:
    """Cast arrays to the float types of these inputs; the session refuses any other mismatch."""
    ready = dict(arrays)
    for spec in specs:
        array = ready.get(spec.name)
        if array is not None and {array.dtype.name, spec.dtype} <= set(_FLOATS):
            ready[spec.name] = array.astype(spec.dtype)
    return ready


def _coarser(a: str, b: str) -> str | None:
    """Return the coarser of two types; None if they differ in more than precision."""
    if a == b:
        return a
    return _FLOATS[min(_FLOATS.index(a), _FLOATS.index(b))] if {a, b} <= set(_FLOATS) else None


def _described(spec: TensorSpec) -> str:
    return spec.describe().removeprefix(f"{spec.name} ")


def _axes(owner: str, spec: TensorSpec) -> list[_Axis]:
    """Return its sizes and its dynamic axes with their model; an unnamed axis is named after its position."""
    return [
        size if isinstance(size, int) else (owner, size if size != UNNAMED_DIMENSION else f"?{spec.name} {axis}")
        for axis, size in enumerate(spec.shape)
    ]


class _Sizes:
    """Dynamic axes that must have the same size, or a known one."""

    def __init__(self) -> None:
        self._same: dict[_Axis, _Axis] = {}

    def join(self, a: _Axis, b: _Axis) -> bool:
        """Require two axes to have the same size; return False if they are different numbers."""
        a, b = self._root(a), self._root(b)
        if a != b and isinstance(a, int) and isinstance(b, int):
            return False
        if a != b:
            a, b = (b, a) if isinstance(b, int) else (a, b)
            self._same[b] = a
        return True

    def of(self, axis: _Axis) -> int | str:
        """Return the size of an axis, or its name if it is dynamic."""
        root = self._root(axis)
        if isinstance(root, int):
            return root
        return UNNAMED_DIMENSION if root[1].startswith(UNNAMED_DIMENSION) else root[1]

    def _root(self, axis: _Axis) -> _Axis:
        while axis in self._same:
            axis = self._same[axis]
        return axis
