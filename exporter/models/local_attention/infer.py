"""Infer `LocalAttention`'s arguments from tensor shapes, and list the shapes that arguments imply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..inference import INV_FREQ, Findings, TensorShapes, from_presence, from_size
from .arguments import LocalAttentionArgs


def infer_arguments(shapes: TensorShapes, given: Mapping[str, Any]) -> Findings:
    """Infer arguments from rotary frequencies.

    Absent frequencies show nothing, because rotary is on if the config gives `dim`.
    """
    if INV_FREQ not in shapes:
        return {}
    findings = {"use_rotary_pos_emb": from_presence(shapes, INV_FREQ)}
    if given.get("rel_pos_emb_config") is None:
        findings["dim"] = from_size(shapes, INV_FREQ, 1, 0, per_unit=2)
    return findings


def expected_shapes(args: LocalAttentionArgs) -> TensorShapes:
    """List every tensor of the state dict."""
    return {} if args.rotary_dim is None else {INV_FREQ: (args.rotary_dim // 2,)}
