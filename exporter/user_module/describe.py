"""Describe a module of the user's own for `inspect`: its inputs, its layers of local attention, and their windows."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint.tensors import check_finite
from .factory import module_from_factory
from .replace import find_layers

# Attributes of a live layer that say which keys a query sees.
_WINDOW = ("window_size", "causal", "look_backward", "look_forward", "exact_windowsize")


def describe_module(factory: str, args: str | None, weights: Path | None, entry: str | None = None) -> dict[str, Any]:
    """Make a module, and describe it in JSON types.

    Args:
        factory: the function that makes it.
        args: its keyword arguments, JSON.
        weights: a checkpoint; None for the weights that the function makes.
        entry: the set of weights, where the checkpoint holds several.

    Raises:
        UsageError: the function does not make a module, the weights do not fit it, or are not finite.
    """
    module, origin = module_from_factory(factory, args, weights, entry=entry)
    check_finite(module.named_parameters())
    layers: list[dict[str, Any]] = []
    for path, (name, _) in find_layers(module).items():
        window = _window(module.get_submodule(path))
        inner = any(path.startswith(f"{layer['path']}.") for layer in layers)
        if not inner:
            layers.append({"path": path, "class": name, **window})
    return {
        "factory": factory,
        "kwargs": dict(origin.kwargs),
        "class": type(module).__qualname__,
        "parameters": sum(x.numel() for x in module.parameters()),
        "weights": origin.weights,
        "inputs": list(inspect.signature(module.forward).parameters),
        "layers": layers,
        "notes": list(origin.notes),
        "warnings": list(origin.warnings),
    }


def _window(layer: nn.Module) -> dict[str, Any]:
    """Return what a live layer says of its window; empty where it has none."""
    core = getattr(layer, "attn_fn", layer)
    found = {name: getattr(core, name) for name in _WINDOW if isinstance(getattr(core, name, None), int | bool)}
    return found
