"""Find upstream's layers in a user's module and replace them by export-friendly ones.

A layer is recognised by the import path of its class, so that no package is imported for it, and a subclass counts if
it does not override `forward`. Each family lists its layers and how they are replaced. A layer that cannot be replaced
is left unchanged, and the report gives the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ...core.error_texts import named_line
from ...core.errors import LocalAttnError, UsageError
from ...core.geometry import WindowGeometry
from ..models.family import LayerCall
from ..models.registry import adapters
from .observe import observe, working_copy

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplacedLayer:
    """A layer that was replaced.

    Args:
        path: where it is in the module; "" is the module itself.
        class_name: import path of the upstream class.
        geometry: its window; None for AFT-local, whose rows see every key.
        lengths: lengths of the sequences it was called with.
        other_paths: other paths of the same object.
    """

    path: str
    class_name: str
    geometry: WindowGeometry | None
    lengths: tuple[int, ...]
    other_paths: tuple[str, ...] = ()

    def window(self) -> str:
        """Describe its window in words."""
        return "AFT-local, every key visible" if self.geometry is None else self.geometry.describe()

    def describe(self) -> str:
        """Describe the layer in one line, for reports."""
        shared = f" (also {', '.join(self.other_paths)})" if self.other_paths else ""
        return f"{self.path or 'the module itself'}{shared}: {self.class_name}, {self.window()}"


@dataclass(frozen=True)
class LeftLayer:
    """A layer that was left unchanged, and the reason."""

    path: str
    class_name: str
    why: str

    def describe(self) -> str:
        """Describe the layer in one line, for reports."""
        return f"{self.path or 'the module itself'}: {self.class_name} left as it is: {self.why}"


@dataclass
class ReplacementReport:
    """The upstream layers of a module that were replaced, and those that were not.

    Args:
        module: a copy with the replacements; the user's own module is not changed.
        replaced: layers with an export-friendly forward.
        left: layers that were left unchanged.
    """

    module: nn.Module
    replaced: list[ReplacedLayer] = field(default_factory=list)
    left: list[LeftLayer] = field(default_factory=list)

    @property
    def windows(self) -> list[WindowGeometry]:
        """The windows of the replaced layers, each once."""
        return list(dict.fromkeys(layer.geometry for layer in self.replaced if layer.geometry is not None))


def replace_local_attention(
    module: nn.Module, example: Callable[[nn.Module], object], *, dynamic_length: bool = False
) -> ReplacementReport:
    """Replace every upstream layer in a copy of a module.

    Args:
        module: the user's module; it is not changed.
        example: calls the module it is given once with example inputs: `lambda m: m(tokens)`. The replaced layers
            accept the lengths of this call, or with `dynamic_length` every length up to those.
        dynamic_length: the sequence length will be dynamic.

    Raises:
        UsageError: the module cannot be copied, or the example call fails.
    """
    found = find_layers(module)
    try:
        calls = observe(working_copy(module), example, {path: owner for path, (_, owner) in found.items()})
    except LocalAttnError:
        raise
    except Exception as error:
        raise UsageError(
            "The module fails on the example inputs.",
            why=named_line(error),
            fix="Check the names, dtypes and shapes of the inputs."
            if all(x.dtype == torch.float32 for x in module.parameters())
            else "It is run and exported with its weights in fp32: its forward must not cast to another type.",
        ) from error
    report = ReplacementReport(working_copy(module))
    paths = _paths_by_object(module)
    for path, (name, owner) in found.items():
        done = (whole for replaced in report.replaced for whole in (replaced.path, *replaced.other_paths))
        if any(path.startswith(f"{whole}." if whole else "") for whole in done):
            continue  # part of a layer that is replaced as a whole
        layer = report.module.get_submodule(path)
        why = _why_left(layer, owner, calls[path])
        geometry = None
        if not why:
            try:
                geometry = adapters()[name](layer, calls[path], dynamic_length)
            except UsageError as error:
                why = " ".join(filter(None, (error.what, error.why)))
        if why:
            report.left.append(LeftLayer(path, name, why))
            continue
        others = tuple(other for other in paths[id(module.get_submodule(path))] if other != path)
        lengths = tuple(sorted({sequence_length(call) for call in calls[path]}))
        _log.info("%s: %s replaced", path or "the module", name)
        report.replaced.append(ReplacedLayer(path, name, geometry, lengths, others))
    return report


def find_layers(module: nn.Module) -> dict[str, tuple[str, type]]:
    """Return the path of every upstream layer in a module → its name in `adapters()` and the upstream class itself."""
    found, known = {}, adapters()
    for path, part in module.named_modules():
        for owner in type(part).__mro__:
            name = f"{owner.__module__}.{owner.__qualname__}"
            if name in known:
                found[path] = (name, owner)
                break
    return found


def sequence_length(call: LayerCall) -> int:
    """Return how many tokens a layer was called with."""
    for name in ("x", "q"):
        if name in call.shapes:
            return call.shapes[name][-2]
    return call.shapes["query"][0]


def _why_left(layer: nn.Module, owner: type, calls: Sequence[LayerCall]) -> str:
    """Return why a layer cannot be replaced whatever its arguments are; "" if it can."""
    if type(layer).forward is not owner.forward or "forward" in vars(layer):  # type: ignore[attr-defined]
        return f"{type(layer).__name__} has a forward of its own."
    if not calls:
        return "The module does not call it with the example inputs."
    return ""


def _paths_by_object(module: nn.Module) -> dict[int, list[str]]:
    paths: dict[int, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(part), []).append(path)
    return paths
