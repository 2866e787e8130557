"""Run the exported module in float64 and record the inputs and outputs of every module inside it.

The modules are the export-friendly ones, whose paths have upstream's names. They ask for fp32 where a file must not
round further; here that becomes float64, so that the recording has no relevant rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..models.parts.float64 import InFloat64
from ..source.source_model import SourceModel, as_tensors

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ModuleCall:
    """The inputs and outputs of one call of a module: floating point tensors only, in float64."""

    inputs: tuple[Floats, ...]
    outputs: tuple[Floats, ...]


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention operator: `query, key, value` as it receives them, its output, and its sinks."""

    query: Floats
    key: Floats
    value: Floats
    output: Floats
    sequence_first: bool
    sinks: Floats | None = None

    def laid_out(self, sequence_first: bool) -> AttentionCall:
        """Return the same call with `[B, N, H, D]`, or with `[B, H, N, D]`."""
        if sequence_first == self.sequence_first:
            return self
        query, key, value, output = (x.transpose(0, 2, 1, 3) for x in (self.query, self.key, self.value, self.output))
        return AttentionCall(query, key, value, output, sequence_first, self.sinks)


@dataclass(frozen=True)
class Recording:
    """The recording of one run.

    Args:
        modules: the modules that were called exactly once, by path; the whole model is "".
        attention: calls of the attention operator, in order.
        parameters: each module's own tensors by module path, float64.
    """

    modules: dict[str, ModuleCall]
    attention: list[AttentionCall]
    parameters: dict[str, dict[str, Floats]]


def record(source: SourceModel, inputs: Mapping[str, NDArray[Any]]) -> Recording:
    """Run the module on the file's inputs and record every call.

    Args:
        source: the model at the file's shapes.
        inputs: arrays by the file's names.
    """
    module = source.module("fp32").double()
    names = source.family.parameters
    arguments = {names.get(name, name): tensor for name, tensor in as_tensors(inputs, torch.float64).items()}
    with InFloat64():
        return record_calls(module, lambda: module(**arguments))


def record_calls(module: nn.Module, run: Callable[[], object]) -> Recording:
    """Record every call in a module while `run()` runs it."""
    calls: dict[str, list[ModuleCall]] = {}
    watcher = _AttentionWatcher()
    with ExitStack() as hooks:
        for path, part in module.named_modules():
            if not isinstance(part, nn.Identity):
                hooks.enter_context(part.register_forward_hook(partial(_note, calls, path), with_kwargs=True))
        with torch.no_grad(), watcher:
            run()
    return Recording(
        modules={path: found[0] for path, found in calls.items() if len(found) == 1},
        attention=watcher.calls,
        parameters={path: _own_tensors(part) for path, part in module.named_modules()},
    )


def _own_tensors(module: nn.Module) -> dict[str, Floats]:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return {name: tensor.detach().numpy() for name, tensor in own if tensor.is_floating_point()}


def _note(
    calls: dict[str, list[ModuleCall]], path: str, _: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """Record a call of the part of a module at `path`."""
    calls.setdefault(path, []).append(ModuleCall(_floats((*args, *kwargs.values())), _floats(output)))


def _floats(values: Any) -> tuple[Floats, ...]:
    values = values if isinstance(values, tuple | list) else (values,)
    return tuple(_copied(x) for x in values if isinstance(x, Tensor) and x.is_floating_point())


def _copied(x: Tensor) -> Floats:
    values: Floats = x.detach().double().numpy().copy()
    return values


class _AttentionWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A torch mode that records the inputs of the attention operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[AttentionCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        grouped = func is torch.ops.localattn.grouped_attention.default
        if grouped or func is torch.ops.localattn.windowed_attention.default:
            query, key, value, out = (_copied(x) for x in (*args[:3], output))
            sinks = None if not grouped or args[4] is None else _copied(args[4])
            self.calls.append(AttentionCall(query, key, value, out, bool(args[12]), sinks))
        return output
