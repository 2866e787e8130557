"""Trace a step source to an ONNX graph with its step nodes and their ONNX functions."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from torch import Tensor

from ...core.dtypes import IO_NAME
from ...core.nodes.step import STEP_VARIANT_BY_OP_TYPE
from ...onnx_graph.fusing import fuse
from ..models.family import TORCH_DTYPE, StepCall
from ..source.step_source import StepSource
from .functions import attach_functions
from .trace import trace_module


class _Entry(torch.nn.Module):
    """A module that calls the model with its inputs grouped as data, position and caches.

    Args:
        model: the module.
        call: how the module is called.
        data: how many data inputs come first.
        computes_in: element type that floating point data inputs are cast to; None leaves them as they are.
        gives: element type of the output.
    """

    def __init__(
        self, model: torch.nn.Module, call: StepCall, data: int, *, computes_in: torch.dtype | None, gives: torch.dtype
    ) -> None:
        super().__init__()
        self.model, self.call, self.data = model, call, data
        self.computes_in, self.gives = computes_in, gives

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        data = inputs[: self.data]
        cast = [x if self.computes_in is None or not x.is_floating_point() else x.to(self.computes_in) for x in data]
        output, *caches = self.call(self.model, cast, inputs[self.data], inputs[self.data + 1 :])
        return output.to(self.gives), *caches


def trace_step(source: StepSource, dtype: str, opset: int) -> ir.Model:
    """Trace the model to ONNX, with step nodes and their ONNX functions.

    Raises:
        UsageError: an opset out of range.
        ExportFailed: PyTorch's exporter could not export it.
    """
    specs = source.inputs(dtype)
    model = trace_module(
        _Entry(
            source.module(dtype),
            source.call,
            len(source.data(dtype)),
            computes_in=TORCH_DTYPE[dtype] if source.source.family.casts_inputs else None,
            gives=getattr(torch, IO_NAME[dtype]),
        ),
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
