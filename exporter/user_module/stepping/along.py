"""Where time is in a value of the graph, and the lengths of axes.

A value with a time axis has one entry for each position, and perhaps some before position 0: left padding puts them
there. Entry `i` belongs to position `i - pre`. In a step file the same value has `C` entries, those of the call's
positions; what an operator needs of earlier ones it keeps in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


class CannotStep(Exception):
    """An operator that a step file cannot compute; the text is the reason, without its place."""


@dataclass(frozen=True, eq=False)
class Along:
    """The time axis of a value.

    Args:
        axis: which axis it is, from 0.
        pre: entries before position 0.
        before: what each of those entries is, with one entry on the time axis; None where they differ.
        alone: the operator computes each position from the same position of its arguments alone, so that entries before
            position 0 are the operator's result for those of its arguments; `Plan` then finds `before`.
    """

    axis: int
    pre: int = 0
    before: Tensor | None = None
    alone: bool = True


@dataclass(frozen=True)
class Size:
    """The size of an axis: `factor` times the length of the sequence, plus `rest`; a fixed size has factor 0."""

    factor: int
    rest: int

    def at(self, length: int) -> int:
        """Return the size at a length."""
        return self.factor * length + self.rest

    def of_call(self, chunk: int) -> int:
        """Return the size in a call of `chunk` positions, without entries before position 0 and after the last."""
        return self.factor * chunk if self.factor else self.rest


def size_of(dim: object) -> Size:
    """Read the size of an axis as PyTorch's exporter states it.

    Raises:
        CannotStep: it is no multiple of the length plus a number.
    """
    if isinstance(dim, int):
        return Size(0, dim)
    expression = dim.node.expr  # type: ignore[attr-defined]
    symbols = list(expression.free_symbols)
    if not symbols:
        return Size(0, int(expression))
    if len(symbols) == 1:
        (symbol,) = symbols
        factor, rest = expression.coeff(symbol, 1), expression.subs(symbol, 0)
        if (expression - factor * symbol - rest).expand() == 0 and factor.is_integer and factor > 0:
            return Size(int(factor), int(rest))
    raise CannotStep(f"it makes an axis of the size {expression}, for a sequence of that length")


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return what the exporter knows of the tensors that a node computes: one, or those of its tuple."""
    value: Any = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for x in value if isinstance(x, torch.Tensor)] if isinstance(value, tuple | list) else []


def sizes_of(tensor: torch.Tensor) -> list[Size]:
    """Return the sizes of a tensor's axes."""
    return [size_of(dim) for dim in tensor.shape]


def time_axes(tensor: torch.Tensor) -> list[int]:
    """Return the axes of a tensor whose size depends on the length of the sequence."""
    return [axis for axis, size in enumerate(sizes_of(tensor)) if size.factor]
