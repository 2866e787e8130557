"""Trace a step source to an ONNX graph with its step nodes and their ONNX functions."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from torch import Tensor

from ...core.nodes.step import STEP_VARIANT_BY_OP_TYPE
from ...onnx_graph.fusing import fuse
from ..source.step_source import StepSource
from .functions import attach_functions
from .trace import Entry, trace_module


class _StepEntry(Entry):
    """A module that calls the model with its inputs grouped as data, position and caches."""

    def __init__(self, source: StepSource, dtype: str) -> None:
        super().__init__(source.module(dtype), source.source, dtype)
        self.call, self.data = source.call, len(source.data(dtype))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        data, position, caches = inputs[: self.data], inputs[self.data], inputs[self.data + 1 :]
        output, *caches_after = self.call(self.model, self.cast(data), position, caches)
        return output.to(self.gives), *caches_after


def trace_step(source: StepSource, dtype: str, opset: int) -> ir.Model:
    """Trace the model to ONNX, with step nodes and their ONNX functions.

    Raises:
        UsageError: an opset out of range.
        ExportFailed: PyTorch's exporter could not export it.
    """
    specs = source.inputs(dtype)
    model = trace_module(
        _StepEntry(source, dtype),
        tuple(torch.zeros([int(n) for n in spec.shape], dtype=getattr(torch, spec.dtype)) for spec in specs),
        [spec.name for spec in specs],
        source.output_names(),
        opset,
    )
    CommonSubexpressionEliminationPass()(model)
    if source.source.family.fuses:
        fuse.apply(model)
    attach_functions(model)
    return model


def step_nodes(model: ir.Model) -> list[ir.Node]:
    """List the step nodes, in order."""
    return [node for node in model.graph if node.op_type in STEP_VARIANT_BY_OP_TYPE]
