"""Run the user's module: unchanged as the reference of its file, and in the form that is traced.

The outputs of a file are the tensors of the module's result, as a flat table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, tree_flatten_with_path

from ...core.error_texts import named_line
from ...core.errors import UsageError
from ...runtime.parity.runner import Runner
from ...runtime.session import Arrays
from ..source.untouched_module import autocast_to
from .inputs import call
from .observe import working_copy


def named_tensors(result: object) -> dict[str, Tensor]:
    """Name the tensors of a result: `out`, or by their keys, field names and places (`out_1`, `logits`, `hidden_0`).

    Raises:
        UsageError: the result has no tensors.
    """
    found: dict[str, Tensor] = {}
    for path, leaf in _leaves(result):
        if isinstance(leaf, Tensor):
            name = "_".join(_part(key) for key in path) or "out"
            found[f"out_{name}" if name[0].isdigit() else name] = leaf
    if not found:
        raise UsageError(
            f"The module returns a {type(result).__name__} without tensors.", why="A file returns tensors."
        )
    return found


def _leaves(result: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], object]]:
    """Yield what is in tables and lists, each with the keys that lead there.

    Tables are read as such, because releases of transformers before 5 register their outputs without names. Caches are
    no outputs of a file.
    """
    if type(result).__module__.partition(".")[0] == "transformers" and type(result).__name__.endswith("Cache"):
        return
    if isinstance(result, Mapping):
        for key, value in result.items():
            yield from _leaves(value, (*path, MappingKey(key)))
    elif type(result) in (list, tuple):
        for index, value in enumerate(cast("Sequence[object]", result)):
            yield from _leaves(value, (*path, SequenceKey(index)))
    else:
        try:
            found, _ = tree_flatten_with_path(result)
        except ValueError:  # a class that is registered without names
            return
        yield from (((*path, *keys), leaf) for keys, leaf in found)


def _part(key: Any) -> str:
    if isinstance(key, SequenceKey):
        return str(key.idx)
    if isinstance(key, MappingKey):
        return str(key.key)
    return str(key.name) if isinstance(key, GetAttrKey) else str(key)


def as_arrays(result: object) -> dict[str, NDArray[Any]]:
    """Return the tensors of a result as arrays by name."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in named_tensors(result).items()}


class ModuleRunner(Runner):
    """A runner of a module in PyTorch: in float64 if that works, so that it shows the file's own error, else in fp32.

    Args:
        module: the user's module.
        untouched: an unchanged copy of it in fp32.
        by_name: whether inputs are passed by name.
        example: inputs that it accepts.

    Attributes:
        notes: why it does not run in float64; empty if it does.
    """

    def __init__(self, module: nn.Module, untouched: nn.Module, by_name: bool, example: Arrays) -> None:
        self._module, self._by_name, self._double = untouched, by_name, False
        self.notes: list[str] = []
        try:
            twin = working_copy(module, double=True)
            call(twin, example, by_name, double=True)
        except Exception as error:  # often it makes fp32 tensors itself; other errors are raised again in fp32
            why = named_line(error, 200)
            self.notes = [f"the reference is in fp32: the module does not run in float64 ({why})"]
        else:
            self._module, self._double = twin, True
        self.name = f"the untouched module in {'float64' if self._double else 'fp32'}"

    def run(self, inputs: Arrays) -> Arrays:
        """Call the module; its errors are not caught."""
        return as_arrays(call(self._module, inputs, self._by_name, double=self._double))

    @property
    def running(self) -> nn.Module:
        """The copy of the module that computes the outputs."""
        return self._module

    def changed(self, change: Callable[[nn.Module], nn.Module]) -> ModuleRunner:
        """Return a runner of another module, which a function makes of this one's."""
        other = copy.copy(self)
        other._module = change(self._module)
        vars(other).pop("_last", None)  # outputs that are kept are those of the other module
        return other

    def check_repeats(self, inputs: Arrays) -> Arrays:
        """Run twice on the same inputs, check that the outputs are equal, and return them.

        Raises:
            UsageError: the two runs differ.
        """
        first, second = self.run(inputs), self.run(inputs)
        for name, array in first.items():
            if not np.array_equal(array, second[name], equal_nan=True):
                raise UsageError(
                    "The module gives two answers to the same inputs.",
                    why=f"Its output {name!r} differs from run to run in evaluation mode, so nothing can be compared.",
                    fix="Turn off what is random in it.",
                )
        return first


class AutocastRunner(Runner):
    """A runner of the untouched module under `torch.autocast`, which shows its own error in half precision.

    Args:
        module: an unchanged copy of the user's module, in fp32.
        by_name: whether inputs are passed by name.
        dtype: "fp32", "fp16" or "bf16".
    """

    def __init__(self, module: nn.Module, by_name: bool, dtype: str) -> None:
        self.name = f"the untouched module in {dtype}"
        self._module, self._by_name, self._dtype = module, by_name, dtype

    def run(self, inputs: Arrays) -> Arrays:
        """Compute the outputs, in fp32; errors of the module are not caught."""
        floats = {name: x.astype(np.float32) if x.dtype.kind == "f" else x for name, x in inputs.items()}
        with autocast_to(self._dtype):
            result = named_tensors(call(self._module, floats, self._by_name))
        return {name: (x.float() if x.is_floating_point() else x).numpy() for name, x in result.items()}


class Entry(nn.Module):
    """A user's module with flat inputs and outputs; the module is the attribute `model`, as the exporter expects.

    Args:
        model: the module.
        names: names of the inputs, in order.
        by_name: whether inputs are passed by name.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], by_name: bool) -> None:
        super().__init__()
        self.model, self.names, self.by_name = model, list(names), by_name

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the module, and return the tensors of its result, in order."""
        given = dict(zip(self.names, inputs, strict=True))
        result = self.model(**given) if self.by_name else self.model(*inputs)
        flat = named_tensors(result).values()
        # An output of a file must not be one of its inputs.
        return tuple(x.clone() if any(x is y for y in inputs) else x for x in flat)
