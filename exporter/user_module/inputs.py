"""The inputs of a user's module: names, element types, shapes, named axes, and numbers to run it on.

    tokens:int64:[2,128]              sizes alone
    x:float32:[batch=2,seq=128,64]    axes with a name can be dynamic
    tokens:int64:[2,128]:256          integers below 256
    tokens:int64:[batch,seq]          sizes that options give: one sequence a batch, as many tokens as seq_len says

Without names, batch is the first axis of the first input and seq its second; axes of the same size at the same
place in the other inputs get the same name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...core.error_texts import argument, named_line
from ...core.errors import UsageError
from ...core.limits import LARGEST_SIZE, is_size
from ...core.tensors import BATCH, SEQUENCE, TensorSpec
from ...runtime.inputs.arrays import random_inputs
from ..source.source_model import as_tensors

Arrays = dict[str, NDArray[Any]]

DTYPES = ("float32", "int64", "int32", "bool")
_INPUT = re.compile(r"([A-Za-z_]\w*):(\w+):\[([^\]]*)\](?::([0-9]{1,19}))?")
_AXIS = re.compile(r"(?:([A-Za-z_]\w*)=)?([0-9]+)")
# Axes that may be written without a size, and the size of one until `sized` gives it.
_NAMED_ALONE = (BATCH, SEQUENCE)
_OPEN = 0
_HOW = "Write 'name:dtype:[sizes]', for instance 'tokens:int64:[1,128]' or 'x:float32:[batch=2,seq=128,64]'."
# Integers of unknown meaning are drawn below this number, because every table has at least two rows.
_SAFE_LIMIT = 2


@dataclass(frozen=True)
class ModuleInput:
    """One input of a user's module.

    Args:
        name: name of the argument of forward.
        dtype: one of `DTYPES`.
        shape: sizes of the example.
        axes: the name of each axis, or "".
        limit: integers are below it; None if it was not given.
        example: the user's own numbers, or None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    limit: int | None = None
    example: NDArray[Any] | None = None

    def spec(self, dynamic_axes: Sequence[str] = ()) -> TensorSpec:
        """Return its name, element type and shape in the file, with dynamic axes by name."""
        named = zip(self.shape, self.axes, strict=True)
        return TensorSpec(self.name, self.dtype, tuple(axis if axis in dynamic_axes else size for size, axis in named))

    def draw(self, seed: int, sizes: Mapping[str, int]) -> NDArray[Any]:
        """Draw random numbers that fit, at the given sizes of the named axes."""
        named = zip(self.shape, self.axes, strict=True)
        shape = tuple(sizes.get(axis, size) if axis else size for size, axis in named)
        limit = self.limit
        if limit is None:
            limit = _SAFE_LIMIT if self.example is None or not self.example.size else int(self.example.max()) + 1
        drawn = random_inputs([TensorSpec(self.name, self.dtype, shape)], seed, token_limit=max(limit, 1))
        return drawn[self.name]


def draw_all(inputs: Sequence[ModuleInput], seed: int, sizes: Mapping[str, int]) -> Arrays:
    """Draw random numbers for every input, at the given sizes of the named axes."""
    return {x.name: x.draw(seed + place, sizes) for place, x in enumerate(inputs)}


def parse_input(text: str) -> ModuleInput:
    """Read one input from its text.

    Raises:
        UsageError: the text has another form than the module's docstring shows.
    """
    match = _INPUT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"Input {text[:80]!r} cannot be read.", why=_HOW)
    name, dtype, inside, limit = match.groups()
    if dtype not in DTYPES:
        raise UsageError(f"Input {name} has the dtype {dtype!r}.", fix=f"Known: {', '.join(DTYPES)}.")
    parts = inside.split(",") if inside.strip() else []
    axes = [axis for part in parts if (axis := _axis(part.strip()))]
    if len(axes) < len(parts):
        why = f"Sizes are numbers from 1 to {LARGEST_SIZE:,}; {' and '.join(_NAMED_ALONE)} may stand without one."
        raise UsageError(f"Input {name} has the shape [{inside[:60]}].", why=why, fix=_HOW)
    shape, names = tuple(size for _, size in axes), tuple(axis for axis, _ in axes)
    return ModuleInput(name, dtype, shape, names, None if limit is None else int(limit))


def _axis(text: str) -> tuple[str, int] | None:
    """Read the name and the size of an axis; None if it has another form."""
    if text in _NAMED_ALONE:
        return text, _OPEN
    match = _AXIS.fullmatch(text)
    return (match[1] or "", int(match[2])) if match and is_size(match[2]) else None


def sized(inputs: Sequence[ModuleInput], length: int | None) -> list[ModuleInput]:
    """Give sizes to axes that were written as a name alone: a batch of 1, and sequences of this length.

    An axis with the same name and a size elsewhere gives that size.

    Raises:
        UsageError: nothing says how long a sequence is.
    """
    known = {axis: size for x in inputs for size, axis in zip(x.shape, x.axes, strict=True) if axis and size}
    sizes = {BATCH: 1, **({} if length is None else {SEQUENCE: length}), **known}
    for x in inputs:
        if SEQUENCE in x.axes and SEQUENCE not in sizes:
            raise UsageError(
                f"Input {x.name} does not say how long {SEQUENCE} is.",
                fix=f"Write the size there ({SEQUENCE}=128), or add {argument('seq_len', 128)}.",
            )
    return [
        replace(x, shape=tuple(size or sizes[axis] for size, axis in zip(x.shape, x.axes, strict=True)))
        if _OPEN in x.shape and x.example is None
        else x
        for x in inputs
    ]


def from_arrays(arrays: Mapping[str, NDArray[Any] | Tensor]) -> list[ModuleInput]:
    """Make inputs with the user's own numbers.

    Raises:
        UsageError: an element type is not supported in files.
    """
    inputs = []
    for name, given in arrays.items():
        array = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
        if array.dtype.name not in DTYPES:
            raise UsageError(f"Input {name!r} is {array.dtype}.", fix=f"Known: {', '.join(DTYPES)}.")
        inputs.append(ModuleInput(name, array.dtype.name, array.shape, ("",) * array.ndim, example=array))
    return inputs


def name_axes(inputs: Sequence[ModuleInput], dynamic: Sequence[str]) -> list[ModuleInput]:
    """Name the axes batch and seq, if the user named no axis.

    Raises:
        UsageError: no axis has a name of `dynamic`, or one name has two sizes.
    """
    if inputs and not any(axis for x in inputs for axis in x.axes):
        usual = dict(zip((BATCH, SEQUENCE), inputs[0].shape, strict=False))
        inputs = [replace(x, axes=_usual_axes(x.shape, usual)) for x in inputs]
    sizes = axis_sizes(inputs)
    for name in dynamic:
        if name not in sizes:
            raise UsageError(
                f"{argument('dynamic')} names {name!r}: no input has an axis of that name.",
                why=f"Named axes: {', '.join(sizes) or 'none'}.",
                fix=_HOW,
            )
    return list(inputs)


def _usual_axes(shape: Sequence[int], usual: Mapping[str, int]) -> tuple[str, ...]:
    """Name the first axis batch and the second seq, where they have these sizes; other axes have no name."""
    names = (BATCH, SEQUENCE, *[""] * len(shape))
    return tuple(name if usual.get(name) == size else "" for name, size in zip(names, shape, strict=False))


def axis_sizes(inputs: Sequence[ModuleInput]) -> dict[str, int]:
    """Return the size of every named axis.

    Raises:
        UsageError: one name has two sizes.
    """
    sizes: dict[str, int] = {}
    for x in inputs:
        for size, axis in zip(x.shape, x.axes, strict=True):
            if axis and sizes.setdefault(axis, size) != size:
                raise UsageError(f"Axis {axis} is {sizes[axis]} and, in {x.name}, {size}.", fix="Give one size.")
    return sizes


def bind(module: nn.Module, names: Sequence[str]) -> bool:
    """Return whether inputs are passed by name; else they are passed by position.

    Raises:
        UsageError: the module's forward does not accept them.
    """
    signature = inspect.signature(module.forward)
    parameters = signature.parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    named = [n for n in names if n in parameters and parameters[n].kind is not inspect.Parameter.POSITIONAL_ONLY]
    by_name = len(named) == len(names) or inspect.Parameter.VAR_KEYWORD in kinds
    near = {n: found for n in names if n not in parameters and (found := get_close_matches(n, parameters, 1, 0.7))}
    try:
        if by_name:
            signature.bind(**dict.fromkeys(names))
        else:
            signature.bind(*names)
        if not by_name and near:
            raise TypeError(" ".join(f"did you mean {found[0]} for {n}?" for n, found in near.items()))
        if not by_name and named:
            raise TypeError(f"{', '.join(n for n in names if n not in named)} is no argument of it")
    except TypeError as error:
        raise UsageError(
            f"{type(module).__name__} does not take the inputs {', '.join(names)}.",
            why=f"Its forward takes ({', '.join(parameters)}): {str(error).rstrip('?.')}{'?' if near else '.'}",
            fix="Name the inputs as forward does.",
        ) from error
    return by_name


def call(module: nn.Module, arrays: Mapping[str, NDArray[Any]], by_name: bool, *, double: bool = False) -> object:
    """Run a module on arrays."""
    with torch.no_grad():
        return apply(module, as_tensors(arrays, torch.float64 if double else None), by_name)


def apply(module: nn.Module, tensors: Mapping[str, Tensor], by_name: bool) -> object:
    """Call a module with tensors, by name or by position."""
    return module(**tensors) if by_name else module(*tensors.values())


def with_token_limits(
    inputs: Sequence[ModuleInput], module: nn.Module, by_name: bool
) -> tuple[list[ModuleInput], list[str]]:
    """Find the limits of integer inputs that have none, from the rows of the embeddings they go into unchanged.

    Returns:
        The inputs with their limits, and a note if the module did not run, so that no limit could be found.
    """
    zeros = {x.name: torch.zeros(x.shape, dtype=getattr(torch, x.dtype)) for x in inputs}
    limits: dict[str, int] = {}
    notes: list[str] = []

    def note(part: nn.Module, args: tuple[Any, ...]) -> None:
        for name, tensor in zeros.items():
            if args and isinstance(args[0], Tensor) and args[0].data_ptr() == tensor.data_ptr() and tensor.numel():
                rows = part.num_embeddings if isinstance(part, nn.Embedding) else 0
                limits[name] = min(rows, limits.get(name, rows))

    try:
        with torch.no_grad(), ExitStack() as hooks:
            for part in module.modules():
                if isinstance(part, nn.Embedding):
                    hooks.enter_context(part.register_forward_pre_hook(note))
            apply(module, zeros, by_name)
    except Exception as error:  # the run that follows refuses a module that always fails
        unknown = [x.name for x in inputs if "int" in x.dtype and x.limit is None and x.name not in limits]
        if unknown:
            notes = [
                f"the vocabulary of {', '.join(unknown)} is not known, so few of its numbers are tried; the module "
                f"does not run on zeros ({named_line(error, 200)})"
            ]
    return [replace(x, limit=limits.get(x.name) if x.limit is None else x.limit) for x in inputs], notes


def other_lengths(inputs: Sequence[ModuleInput], lengths: set[int], step: int) -> Iterator[Arrays]:
    """Yield inputs at sizes at which the sequences may be shorter or longer, the likeliest first.

    It is not known which axis is the sequence: it may be the one with that name, or any that is as long as one, at the
    same place in all inputs. The caller has to check the result.

    Args:
        inputs: the inputs at the sizes of the file.
        lengths: lengths of the sequences.
        step: the number of tokens by which they get shorter or longer.
    """
    named = [{axis for axis, name in enumerate(x.axes) if name == SEQUENCE} for x in inputs]
    tried = [named] if any(named) else []
    for place in range(max(len(x.shape) for x in inputs)):
        chosen = [{place} if place < len(x.shape) and x.shape[place] in lengths else set() for x in inputs]
        if any(chosen) and chosen not in tried:
            tried.append(chosen)
    for axes in tried:
        for change in (-step, step, 2 * step, 4 * step):  # a model that halves its sequence accepts some lengths only
            resized = [
                replace(
                    x,
                    shape=tuple(n + change * (axis in at) for axis, n in enumerate(x.shape)),
                    axes=("",) * len(x.shape),
                )
                for x, at in zip(inputs, axes, strict=True)
            ]
            if all(size > 0 for x in resized for size in x.shape):
                yield draw_all(resized, 0, {})
