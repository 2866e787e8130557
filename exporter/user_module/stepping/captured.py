"""Operators that stand for whole layers while a module is captured: attention, and recurrent layers.

PyTorch's exporter would write a recurrent layer as one copy of its cell for each token, and an attention as its
formula over all tokens. Each layer is one node here, with its number among the layers of the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...models.local_attention.adapter import WindowedCore

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)


@torch.library.custom_op("localattn::captured_attention", mutates_args=())
def captured_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attn_bias: Tensor | None, layer: int
) -> Tensor:
    """Stand for `WindowedCore.forward`, whose result has the shape of its queries."""
    raise NotImplementedError("this operator is in captured graphs only")


@captured_attention.register_fake
def _(query: Tensor, *_rest: object, **_options: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("localattn::captured_recurrent", mutates_args=())
def captured_recurrent(x: Tensor, states: Sequence[Tensor], layer: int, width: int) -> Tensor:
    """Stand for the outputs of a recurrent layer, `[…, width]`; without states it begins with zeros."""
    raise NotImplementedError("this operator is in captured graphs only")


@captured_recurrent.register_fake
def _(x: Tensor, states: Sequence[Tensor], layer: int, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


@torch.library.custom_op("localattn::captured_last_state", mutates_args=())
def captured_last_state(x: Tensor, layer: int, shape: Sequence[int]) -> Tensor:
    """Stand for the state of a recurrent layer after the last token."""
    raise NotImplementedError("this operator is in captured graphs only")


@captured_last_state.register_fake
def _(x: Tensor, layer: int, shape: Sequence[int]) -> Tensor:
    return x.new_empty(shape)


class CapturedRecurrent(nn.Module):
    """A recurrent layer as one node.

    Args:
        layer: the user's.
        number: of the layer in the capture.
    """

    def __init__(self, layer: Any, number: int) -> None:
        super().__init__()
        self.layer, self.number = layer, number
        self.batch_first = layer.batch_first

    def forward(self, x: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """Return the outputs, and the last states."""
        layer = self.layer
        is_lstm = isinstance(layer, nn.LSTM)
        states = [] if hx is None else list(hx) if isinstance(hx, tuple | list) else [hx]
        directions = 2 if layer.bidirectional else 1
        width = directions * (getattr(layer, "proj_size", 0) or layer.hidden_size)
        out = captured_recurrent(x, states, self.number, width)
        batch = [] if x.dim() == 2 else [x.shape[0 if self.batch_first else 1]]
        shape = [directions * layer.num_layers, *batch, layer.hidden_size]
        last = tuple(captured_last_state(x, self.number, shape) for _ in range(2 if is_lstm else 1))
        return out, last if is_lstm else last[0]


def capture_layers(module: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Let a module's layers be one node each, in place.

    Args:
        module: the user's, in which upstream's layers are replaced already.

    Returns:
        The layers by their numbers: the path, and the attention's `WindowedCore` or the recurrent layer.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, part in list(module.named_modules()):
        number = len(found)
        if isinstance(part, WindowedCore):
            found[number] = (path.rpartition(".")[0], part)
            part.forward = _attention(number)  # type: ignore[method-assign]
        elif type(part) in RECURRENT and "forward" not in vars(part):
            found[number] = (path, part)
            owner, _, name = path.rpartition(".")
            if not path:
                continue
            setattr(module.get_submodule(owner), name, CapturedRecurrent(part, number))
    return found


def _attention(number: int) -> Callable[..., Tensor]:
    """Return the forward of the attention of this number."""

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attn_bias: Tensor | None) -> Tensor:
        out: Tensor = captured_attention(q, k, v, mask, attn_bias, number)
        return out

    return forward
