"""The outputs of a user's module as a flat table of named tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, tree_flatten_with_path

from ...core.errors import UsageError


def named_tensors(result: object) -> dict[str, Tensor]:
    """Name the tensors of a result: `out`, or by their keys, field names and places (`out_1`, `logits`, `hidden_0`).

    Raises:
        UsageError: the result has no tensors.
    """
    found: dict[str, Tensor] = {}
    for path, leaf in tree_flatten_with_path(result)[0]:
        if isinstance(leaf, Tensor):
            name = "_".join(_part(key) for key in path) or "out"
            found[f"out_{name}" if name[0].isdigit() else name] = leaf
    if not found:
        raise UsageError(
            f"The module returns a {type(result).__name__} without tensors.", why="A file returns tensors."
        )
    return found


def _part(key: Any) -> str:
    if isinstance(key, SequenceKey):
        return str(key.idx)
    if isinstance(key, MappingKey):
        return str(key.key)
    return str(key.name) if isinstance(key, GetAttrKey) else str(key)


def as_arrays(result: object) -> dict[str, NDArray[Any]]:
    """Return the tensors of a result as arrays by name."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in named_tensors(result).items()}


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
