"""Infer `AFTLocal`'s arguments from tensor shapes, and list the shapes that arguments imply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..inference import Findings, Inferred, TensorShapes, from_presence, from_size
from .arguments import AFTLocalArgs


def infer_arguments(shapes: TensorShapes, given: Mapping[str, Any]) -> Findings:
    """Infer arguments from shapes.

    Raises:
        UsageError: a tensor is missing or has another number of axes.
    """
    return {
        "d_model": from_size(shapes, "query.weight", 2, 1),
        "seq_len": from_size(shapes, "pos_bias", 2, 0),
        "bias": from_presence(shapes, "query.bias"),
    }


def infer_values(state: Mapping[str, Tensor]) -> Findings:
    """Infer the window from `local_mask`, because no shape shows it."""
    mask = state.get("local_mask")
    if mask is None or mask.ndim != 2:
        return {}
    kept = int(mask[0].count_nonzero())
    return {"local_window_size": Inferred(kept, "local_mask", f"the first row of local_mask keeps {kept} biases")}


def expected_shapes(args: AFTLocalArgs) -> TensorShapes:
    """List every tensor of the state dict."""
    square, table = (args.d_model, args.d_model), (args.seq_len, args.seq_len)
    shapes: TensorShapes = {"pos_bias": table, "local_mask": table, "output.weight": square, "output.bias": square[:1]}
    for name in ("query", "key", "value"):
        shapes |= {f"{name}.weight": square} | ({f"{name}.bias": square[:1]} if args.bias else {})
    return shapes
