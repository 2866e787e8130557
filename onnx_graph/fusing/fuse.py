"""Run the passes in order: split products, then rotary embeddings and gates, then the layout around attention."""

from __future__ import annotations

from typing import Any

from . import gates, layout, norms, products, rotary


def apply(model: Any) -> None:
    """Rewrite a traced `onnx_ir.Model`, in place; its results change only by rounding.

    Values that stay keep their names.
    """
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    for step in (products, rotary, gates, norms, layout):
        step.apply(model)
        RemoveUnusedNodesPass()(model)
