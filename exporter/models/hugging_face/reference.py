"""The reference of a Hugging Face model: transformers' own untouched module, truly in float64.

Converted with `.double()` alone a model still drops to fp32 in its softmax, norms and rotary embedding, and a padded
batch becomes NaN in eager attention. Under `InFloat64` none of it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..family import ModelSpec, State
from ..parts import routing
from ..parts.float64 import Float64State, InFloat64
from .arguments import HuggingFaceArgs, Layer
from .module import build, load
from .observe import takes_cache

_MOST_SEEING = 0.9


def reference(
    spec: ModelSpec, state: Float64State, inputs: Mapping[str, Tensor], positions: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the outputs of the untouched model in float64."""
    return _run(spec, state, inputs)[0]


def undecided(spec: ModelSpec, state: Float64State, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return the tokens `[B, N]` whose experts rounding decides in a precision; None in a model without experts.

    With them go the tokens that see one of them through a later layer, as long as a tenth remains.
    """
    args: HuggingFaceArgs = spec.args
    if not any("expert" in name for name in args.config):
        return None
    batch, length = shape = inputs[args.inputs[0]].shape
    chosen = [
        routing.undecided(x, dtype).reshape(shape) for x in _run(spec, state, inputs)[1] if len(x) == batch * length
    ]
    if not chosen:
        return None
    own = torch.stack(chosen).any(0)
    if len(chosen) != len(args.layers):
        return own
    reached = chosen[0]
    for layer, after in zip(args.layers[1:], chosen[1:], strict=True):
        reached = _seeing(reached, layer) | after
    return reached if reached.double().mean() <= _MOST_SEEING else own


def _seeing(marked: Tensor, layer: Layer) -> Tensor:
    """Return which tokens see a marked one, or are one."""
    length = marked.shape[1]
    intervals = [layer.geometry.receptive_interval(query, length) for query in range(length)]
    first, end = torch.tensor(intervals).unbind(1)
    before = torch.nn.functional.pad(marked.long().cumsum(1), (1, 0))
    return (before[:, end] > before[:, first]) | marked


def _run(spec: ModelSpec, state: Float64State, inputs: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Compute the outputs, and by how much each choice of experts was decided."""
    args: HuggingFaceArgs = spec.args
    model = state.module(lambda: build(args), load)
    given = {"use_cache": False} if takes_cache(model) else {}  # type: ignore[arg-type]
    with torch.no_grad(), InFloat64() as mode:
        result = model(**inputs, **given)
    return tuple(result[name] for name in args.outputs), mode.margins


def untouched(spec: ModelSpec, state: State) -> nn.Module:
    """Build the untouched model in fp32; it takes the file's inputs by name, and returns its first output alone."""
    args: HuggingFaceArgs = spec.args
    model = build(args)
    load(model, state)
    given = {"use_cache": False} if takes_cache(model) else {}
    own = type(model).forward

    def forward(self: Any, **inputs: Tensor) -> Tensor:
        found: Tensor = own(self, **inputs, **given)[args.outputs[0]]
        return found

    model.forward = MethodType(forward, model)  # type: ignore[method-assign]
    module: nn.Module = model.requires_grad_(False)
    return module
