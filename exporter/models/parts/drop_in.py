"""Give a live layer another forward: same call, same weights, same results, but exportable.

Every adapter checks that the layer is what upstream builds and was called in a way a file can repeat; if not, it raises
UsageError with the reason before anything is changed, and the layer is left alone.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def install(layer: nn.Module, forward: type[nn.Module], core: nn.Module, **attributes: Any) -> None:
    """Give a live layer the forward of another class, in place.

    The object stays where it is, whoever refers to it, with every weight, attribute and hook it had, `isinstance`
    included; only its forward is new. It computes from the layer's own submodules, so that a norm or a matrix that the
    user put in place of upstream's stays in use.

    Args:
        layer: the live layer.
        forward: the class that brings the forward.
        core: added to the layer as `exported_core`.
        attributes: set on the layer.
    """
    original = type(layer)
    layer.__class__ = type(original.__name__, (forward, original), {"__module__": original.__module__})
    layer.add_module("exported_core", core)
    for name, value in attributes.items():
        setattr(layer, name, value)
