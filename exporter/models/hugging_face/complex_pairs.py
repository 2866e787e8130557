"""Compute complex numbers as pairs of real ones, where a model writes its rotary embedding with them.

ONNX has no complex numbers that runtimes compute with. Under `ComplexAsPairs` the few operations that rotary
embedding needs are done on `[…, 2]`, a real and an imaginary part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Pairs:
    """Complex numbers `[…]`, kept as real ones `[…, 2]`."""

    def __init__(self, real: Tensor) -> None:
        self.real = real

    def __mul__(self, other: Pairs | float) -> Pairs:
        """Multiply by numbers of the same kind, or by a real factor.

        The product is written as a rotation of neighbouring channels, in which the rewriting passes find one node.
        """
        if not isinstance(other, Pairs):
            return Pairs(self.real * other)
        x, (cosine, sine) = self.real.flatten(-2), other.real.unbind(-1)
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        product = x * cosine.repeat_interleave(2, dim=-1) + turned * sine.repeat_interleave(2, dim=-1)
        return Pairs(product.reshape(*product.shape[:-1], -1, 2))

    def __getitem__(self, index: Any) -> Pairs:
        """Take a part of all axes but the last."""
        return Pairs(self.real[(*index, Ellipsis, slice(None)) if isinstance(index, tuple) else index])

    def to(self, *_: Any, **__: Any) -> Pairs:
        """Return itself: upstream only moves such tensors to a device."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Give the real numbers back; nothing else is done with them."""
        if func is not torch.view_as_real:
            raise NotImplementedError(f"{func} of complex numbers")
        real: Tensor = args[0].real
        return real


class ComplexAsPairs(TorchFunctionMode):
    """A torch mode that makes `Pairs` where a model would make complex tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch, or make `Pairs`."""
        if func is torch.view_as_complex:
            return Pairs(args[0])
        if func is torch.polar:
            radius, angle = args
            return Pairs(torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1))
        return func(*args, **(kwargs or {}))
