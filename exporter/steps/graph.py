"""A step source as an ONNX graph with its step nodes and their bodies."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from torch import Tensor

from ...core.step_node import STEP_VARIANT_BY_OP_TYPE
from ..graph import trace_module
from .body import step_function_body
from .source import Call, StepSource


class _Entry(torch.nn.Module):
    """Calls the module with its inputs sorted: data, position, caches."""

    def __init__(self, model: torch.nn.Module, call: Call, data: int) -> None:
        super().__init__()
        self.model, self.call, self.data = model, call, data

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.call(self.model, inputs[: self.data], inputs[self.data], inputs[self.data + 1 :])


def trace_step(source: StepSource, dtype: str, opset: int) -> ir.Model:
    """The model as ONNX, step nodes with their function bodies.

    Raises:
        UsageError: an opset out of range.
        ExportFailed: PyTorch's exporter gave up.
    """
    specs = source.inputs(dtype)
    model = trace_module(
        _Entry(source.module(dtype), source.call, len(source.data(dtype))),
        tuple(torch.zeros([int(n) for n in spec.shape], dtype=getattr(torch, spec.dtype)) for spec in specs),
        [spec.name for spec in specs],
        source.output_names(),
        opset,
    )
    CommonSubexpressionEliminationPass()(model)
    for node in step_nodes(model):
        variant = STEP_VARIANT_BY_OP_TYPE[node.op_type]
        body = step_function_body(variant, opset)
        model.functions.setdefault(body.identifier(), body)
    return model


def step_nodes(model: ir.Model) -> list[ir.Node]:
    """The step nodes, in order."""
    return [node for node in model.graph if node.op_type in STEP_VARIANT_BY_OP_TYPE]
