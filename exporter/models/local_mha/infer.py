"""Infer `LocalMHA`'s arguments from tensor shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....core.errors import UsageError
from ..inference import INV_FREQ, Findings, Inferred, TensorShapes, from_presence, from_size, size_of


def infer_arguments(shapes: TensorShapes, given: Mapping[str, Any], prefix: str = "") -> Findings:
    """Infer arguments from the shapes below a prefix; given ones decide where heads and their size are ambiguous.

    Raises:
        UsageError: a tensor is missing or has sizes that no arguments produce.
    """
    inv_freq = f"{prefix}attn_fn.{INV_FREQ}"
    findings = {
        "dim": from_size(shapes, f"{prefix}to_qkv.weight", 2, 1),
        "prenorm": from_presence(shapes, f"{prefix}norm.weight"),
        "qk_rmsnorm": from_presence(shapes, f"{prefix}q_scale"),
        "gate_values_per_head": from_presence(shapes, f"{prefix}to_v_gate.0.weight"),
    }
    # A state dict without buffers may still belong to a model with rotary, if the config says so.
    if inv_freq in shapes or given.get("use_rotary_pos_emb") is not True:
        findings["use_rotary_pos_emb"] = from_presence(shapes, inv_freq)
    return findings | _infer_heads(shapes, given, prefix)


def _infer_heads(shapes: TensorShapes, given: Mapping[str, Any], prefix: str) -> Findings:
    """Infer `heads` and `dim_head`: `to_qkv` shows their product, and one of them is given or in another tensor."""
    to_qkv = f"{prefix}to_qkv.weight"
    inner, rest = divmod(size_of(shapes, to_qkv, 2, 0), 3)
    if rest or not inner:
        raise UsageError(f"{to_qkv} is {list(shapes[to_qkv])}.", why="Its rows are q, k and v: thrice as many.")
    findings: Findings = {}
    for name, key, axes, per_unit in (
        ("dim_head", f"{prefix}q_scale", 1, 1),
        ("dim_head", f"{prefix}attn_fn.{INV_FREQ}", 1, 2),
        ("heads", f"{prefix}to_v_gate.0.weight", 2, 1),
        ("heads", "dynamic_pos_bias.mlp.4.weight", 2, 1),
    ):
        if key in shapes and name not in findings:
            findings[name] = from_size(shapes, key, axes, 0, per_unit)
    for known, other in (("dim_head", "heads"), ("heads", "dim_head")):
        value = findings[known].value if known in findings else given.get(known)
        if other in findings or type(value) is not int or value < 1:
            continue
        if inner % value:
            raise UsageError(
                f"{to_qkv} is {list(shapes[to_qkv])}, which {known} = {value} does not divide.",
                why=f"Its rows are 3 * heads * dim_head; a third of them is {inner}.",
            )
        how = f"{to_qkv} is {list(shapes[to_qkv])} and {known} is {value}"
        findings[other] = Inferred(inner // value, to_qkv, how)
    return findings
