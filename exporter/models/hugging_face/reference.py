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
from ..parts.float64 import Float64State, InFloat64
from .arguments import HuggingFaceArgs
from .module import build, load
from .observe import takes_cache


def reference(
    spec: ModelSpec, state: Float64State, inputs: Mapping[str, Tensor], positions: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the outputs of the untouched model in float64."""
    args: HuggingFaceArgs = spec.args
    model = state.module(lambda: build(args), load)
    given = {"use_cache": False} if takes_cache(model) else {}  # type: ignore[arg-type]
    with torch.no_grad(), InFloat64():
        result = model(**inputs, **given)
    return tuple(result[name] for name in args.outputs)


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
