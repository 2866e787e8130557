"""List the arguments that change a model's outputs and that its weights do not show."""

from __future__ import annotations

from collections.abc import Collection

from ..models.arguments import Arguments
from ..models.registry import ClassEntry
from .traceless import traceless_arguments

# Padding decides which lengths a model accepts, but changes no output.
_WITHOUT_EFFECT = {"autopad"}


def not_in_weights(entry: ClassEntry, args: Arguments, inferred: Collection[str]) -> list[str]:
    """List the arguments that no tensor shows, wherever their values came from.

    Args:
        entry: the class.
        args: arguments of the model.
        inferred: names of the arguments that its weights show.
    """
    possible = traceless_arguments(entry, args.model_dump())
    names = [name for name in possible if name not in {*inferred, *_WITHOUT_EFFECT}]
    if getattr(args, "num_residual_streams", 1) > 1:
        names.append("hyper_connections")
    return names
