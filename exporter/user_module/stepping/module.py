"""The module that computes a plan, a few positions a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .plan import Call, Plan


class StepModule(nn.Module):
    """A module of the user's own for `C` positions a call.

    Args:
        plan: how it is computed.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        for name, tensor in (plan.buffers | plan.weights).items():
            self.register_buffer(name, tensor.detach(), persistent=False)
        self.layers = nn.Module()
        for path, layer in plan.modules.values():
            _put(self.layers, path, layer)

    def forward(self, data: Sequence[Tensor], position: Tensor, caches: Sequence[Tensor]) -> list[Tensor]:
        """Compute the outputs and the next caches, in order; position int64 `[1]`."""
        plan = self.plan
        before = {cache.name: given for cache, given in zip(plan.caches, caches, strict=True)}
        values: dict[Any, Any] = dict(zip(plan.inputs, data, strict=True))
        call = Call(values, position, plan.chunk, before, self)
        for step in plan.steps:
            values[step.node] = step.execute(call)
        return [*(values[node] for node in plan.outputs), *(call.kept[cache.name] for cache in plan.caches)]


class StepEntry(nn.Module):
    """The module that is traced: data, position and caches one after the other.

    Args:
        model: the step module.
        data: how many data inputs there are.
    """

    def __init__(self, model: StepModule, data: int) -> None:
        super().__init__()
        self.model, self.data = model, data

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs and the next caches."""
        found = self.model(inputs[: self.data], inputs[self.data], inputs[self.data + 1 :])
        return tuple(found)


def _put(root: nn.Module, path: str, layer: nn.Module) -> None:
    """Put a layer where the user's module has it, so that its node is named after it."""
    *folders, name = [f"{part}_" if hasattr(torch.nn.Module, part) else part for part in path.split(".") if part] or [
        "attention"
    ]
    for folder in folders:
        if folder not in dict(root.named_children()):
            root.add_module(folder, nn.Module())
        root = root.get_submodule(folder)
    while name in dict(root.named_children()):
        name += "_"
    root.add_module(name, layer)
