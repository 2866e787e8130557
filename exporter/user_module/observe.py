"""Observe the arguments of calls to the layers of a user's module while the unchanged module runs once.

Of a mask that the module's inputs decide, the values in one run say nothing about those in another: padding need not
occur in random inputs at all. So it is told which tensors are computed from the inputs, rather than from the module's
weights and sizes alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.dtypes import SHORT_NAME
from ...core.error_texts import argument, first_line
from ...core.errors import UsageError
from ..models.family import LayerCall

# Operators whose results have the sizes of a tensor, and none of its values.
_SIZES_ALONE = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
# A number that Python has: what is computed from it cannot be followed.
_TO_PYTHON = "aten::_local_scalar_dense"


def observe(
    module: nn.Module, run: Callable[[nn.Module], object], layers: Mapping[str, type]
) -> dict[str, list[LayerCall]]:
    """Record the calls of some layers while `run(module)` runs.

    Args:
        module: the module, in evaluation mode.
        run: calls the module.
        layers: path of each layer, and the class that defines the arguments of its forward.
    """
    calls: dict[str, list[LayerCall]] = {path: [] for path in layers}
    dependence = Dependence()

    def mark(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        dependence.mark((args, kwargs))

    def note(
        path: str, known: inspect.Signature, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        calls[path].append(_call(known.bind(layer, *args, **kwargs).arguments, dependence))

    with ExitStack() as hooks:
        hooks.enter_context(module.register_forward_pre_hook(mark, with_kwargs=True))
        for path, owner in layers.items():
            hook = partial(note, path, inspect.signature(owner.forward))  # type: ignore[attr-defined]
            hooks.enter_context(module.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True))
        with torch.no_grad(), dependence:
            run(module)
    return calls


class Dependence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, follows tensors that depend on marked ones.

    A result depends on the inputs if one of its operands does; so does a tensor that such a value was written into,
    and the tensor that it is a view of. Once a number went to Python, everything counts as dependent.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dependent = WeakTensorKeyDictionary()
        self._everything = False

    def mark(self, values: Iterable[Any]) -> None:
        """Mark the tensors among some values, in whatever tables and lists they are."""
        for x in tree_leaves(list(values)):
            if isinstance(x, Tensor):
                self._dependent[x] = True

    def depends(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on a marked one."""
        return self._everything or tensor in self._dependent

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and mark its results if an operand is marked."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        operands = [x for x in tree_leaves((args, dict(kwargs or {}))) if isinstance(x, Tensor)]
        if name in _SIZES_ALONE or not any(x in self._dependent for x in operands):
            return result
        if name == _TO_PYTHON:
            self._everything = True
        written = [x for x in _written(func, args, kwargs or {}) if isinstance(x, Tensor)]
        self.mark((result, written, [x._base for x in written if x._base is not None]))
        return result


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """List the operands that an operator writes to."""
    found = []
    for place, formal in enumerate(func._schema.arguments):
        if formal.alias_info is not None and formal.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(formal.name))
    return tree_leaves(found)


class AutocastSeen(TorchFunctionMode):
    """A torch mode that notes whether `torch.autocast` is on for the CPU while something is computed.

    Attributes:
        dtype: the type that it rounds to; None if it was not on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype: torch.dtype | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch."""
        if torch.is_autocast_enabled("cpu"):
            self.dtype = torch.get_autocast_dtype("cpu")
        return func(*args, **(kwargs or {}))


def refuse_autocast(what: str, dtype: torch.dtype) -> UsageError:
    """Make the error for something that computes under `torch.autocast`.

    Args:
        what: the module, or where the function was called.
        dtype: the type that it rounds to.
    """
    name = str(dtype).removeprefix("torch.")
    return UsageError(
        f"{what} under torch.autocast, in {name}.",
        why="Its roundings would be traced into the file, and no float64 reference has them.",
        fix=f"Take autocast out, and let the file be of that type: {argument('dtype', SHORT_NAME.get(name, name))}.",
    )


def _call(arguments: Mapping[str, Any], dependence: Dependence) -> LayerCall:
    given = {name: value for name, value in list(arguments.items())[1:] if value is not None}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    masks = {name: _distinct_rows(value) for name, value in tensors.items() if value.dtype == torch.bool}
    light = {name: value for name, value in given.items() if name not in tensors}
    dependent = frozenset(name for name, value in tensors.items() if dependence.depends(value))
    return LayerCall(shapes, {**dict.fromkeys(shapes), **masks, **light}, dependent)


def _distinct_rows(mask: Tensor) -> Tensor:
    """Copy a mask; of one row that was expanded to many, that row."""
    return (mask[:1] if mask.ndim and mask.stride(0) == 0 else mask).clone()


def working_copy(module: nn.Module, *, double: bool = False) -> nn.Module:
    """Copy the module on the CPU, in fp32 (or float64) and in evaluation mode, sharing weights where possible.

    Raises:
        UsageError: the module holds something that cannot be copied, or no weights.
    """
    tensors = (*module.parameters(), *module.buffers())
    if any(x.device.type == "meta" for x in tensors):
        raise UsageError(
            f"The {type(module).__name__} has no weights.",
            why="Some of its tensors are on the device meta, which keeps shapes alone.",
            fix="Load the weights first: model.to_empty(device='cpu'), then load_state_dict.",
        )
    as_needed = not double and all(
        x.device.type == "cpu" and (not x.is_floating_point() or x.dtype == torch.float32) for x in tensors
    )
    memo: dict[int, Any] = {id(x): x for x in module.parameters()} if as_needed else {}
    for part in module.modules():
        # A tensor that a hook computed from weights (weight_norm) has autograd history, with which it cannot be copied.
        derived = (x for x in vars(part).values() if isinstance(x, Tensor) and not x.is_leaf)
        memo |= {id(x): x.detach() for x in derived}
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        raise UsageError(
            f"The {type(module).__name__} cannot be copied.",
            why=f"copy.deepcopy: {first_line(error)}",
            fix="Keep files, locks and generators out of the module.",
        ) from error
    if not as_needed:
        copied = (copied.double() if double else copied.float()).cpu()
    return copied.eval()
