"""Replace the forward of a live layer by an exportable one with the same arguments, weights and results.

Every adapter checks that the layer is built as upstream builds it and was called in a way that a file supports. If not,
it raises UsageError with the reason before anything is changed.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def install(layer: nn.Module, forward: type[nn.Module], core: nn.Module, **attributes: Any) -> None:
    """Give a live layer the forward of another class, in place.

    The layer stays the same object with all its weights, attributes and hooks, and `isinstance` still holds; only its
    forward is new. The new forward uses the layer's own submodules, so that a norm or a matrix that the user put in
    place of upstream's stays in use.

    Args:
        layer: the live layer.
        forward: the class with the new forward.
        core: added to the layer as `exported_core`.
        attributes: set on the layer.
    """
    original = type(layer)
    layer.__class__ = type(original.__name__, (forward, original), {"__module__": original.__module__})
    layer.add_module("exported_core", core)
    for name, value in attributes.items():
        setattr(layer, name, value)
