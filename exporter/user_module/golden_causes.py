"""Try other windows in the layers of a user's own module, where what it recorded differs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ...runtime.parity.golden import GoldenSample
from ...runtime.session import Arrays
from ..checks.golden_causes import Trial, other_values, what_fits
from .module_runner import ModuleRunner

# What upstream's LocalAttention keeps of its arguments, and reads at each call.
_ARGUMENTS = ("window_size", "causal", "exact_windowsize", "look_backward", "look_forward", "shared_qk")


def causes_in(reference: ModuleRunner) -> Callable[[GoldenSample], str]:
    """Return what says which other window of a module's layers fits a recorded sample."""

    def causes(sample: GoldenSample) -> str:
        return what_fits(sample, reference.run, _trials(reference, sample))

    return causes


def _layers(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if all(name in vars(part) for name in _ARGUMENTS)]


def _trials(reference: ModuleRunner, sample: GoldenSample) -> Iterator[Trial]:
    """Yield trials in which one argument of all layers that have its value is another one."""
    length = max((x.shape[1] for x in sample.inputs.values() if x.ndim > 1), default=1)
    for name in _ARGUMENTS:
        for given in dict.fromkeys(getattr(layer, name) for layer in _layers(reference.running)):
            for value in other_values(name, given, length):

                def run(inputs: Arrays, name: str = name, given: object = given, value: object = value) -> Arrays:
                    return reference.changed(lambda module: _change(module, name, given, value)).run(inputs)

                yield Trial(name, value, given, run)


def _change(module: nn.Module, name: str, given: object, value: object) -> nn.Module:
    """Return a copy of a module with another value in its layers; weights are shared."""
    other = copy.deepcopy(module, {id(x): x for x in (*module.parameters(), *module.buffers())})
    for layer in _layers(other):
        if getattr(layer, name) == given:
            setattr(layer, name, value)
            if name == "causal":
                layer.look_forward = 0 if value else 1
    return other
