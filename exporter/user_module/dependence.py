"""Tell which tensors of a run are computed from the module's inputs, rather than from its weights and sizes alone.

Of a mask that the inputs decide, the values in one run say nothing about those in another: padding need not occur in
random inputs at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

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
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return tree_leaves(found)
