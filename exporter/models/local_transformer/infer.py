"""Infer `LocalTransformer`'s arguments from tensor shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ....core.errors import UsageError
from ..inference import Findings, Inferred, TensorShapes, from_presence, from_size, size_of
from ..local_mha.infer import infer_arguments as infer_mha_arguments
from .arguments import feed_forward_width

_LAYER = re.compile(r"layers\.([0-9]{1,6})\.")


def recognises(shapes: TensorShapes) -> bool:
    """Return whether the names in a state dict are a LocalTransformer's.

    Raises:
        UsageError: it has global layers, which this package cannot rebuild.
    """
    if any(name.startswith("global_layers.") for name in shapes):
        raise UsageError(
            "The checkpoint has global attention layers (global_layers.*).",
            why="They are torch modules of any kind, which nothing here can rebuild.",
            fix="Only models without global_attn_layer are supported.",
        )
    return any(name.startswith(("layers.", "token_emb.", "pos_emb.")) for name in shapes)


def infer_arguments(shapes: TensorShapes, given: Mapping[str, Any]) -> Findings:
    """Infer arguments from shapes; given ones help where several fit equally.

    Raises:
        UsageError: a tensor is missing or has sizes that no arguments produce.
    """
    findings = _infer_layers(shapes)
    attention = infer_mha_arguments(shapes, {**given, "use_rotary_pos_emb": None}, prefix="layers.0.0.branch.")
    # LocalTransformer sets these two itself.
    del attention["prenorm"], attention["use_rotary_pos_emb"]
    findings |= attention
    findings["use_dynamic_pos_bias"] = from_presence(shapes, "dynamic_pos_bias.mlp.0.weight")
    if "token_emb.weight" in shapes:
        findings["num_tokens"] = from_size(shapes, "token_emb.weight", 2, 0)
        findings["max_seq_len"] = from_size(shapes, "pos_emb.weight", 2, 0)
    else:
        findings["num_tokens"] = Inferred(None, "token_emb.weight", "token_emb.weight is absent")
    findings["ff_mult"] = _infer_ff_mult(shapes, findings["dim"].value, given.get("ff_mult"))
    return findings


def _infer_layers(shapes: TensorShapes) -> Findings:
    indices = {int(match[1]) for name in shapes if (match := _LAYER.match(name))}
    depth = max(indices, default=-1) + 1
    if depth != len(indices):
        absent = next(index for index in range(depth) if index not in indices)
        raise UsageError(f"The checkpoint has a layer {depth - 1} but no layer {absent}.")
    last = f"layers.{depth - 1}"
    findings = {"depth": Inferred(depth, f"{last}.0.branch.to_qkv.weight", f"{last} is the last layer")}
    static_beta = "layers.0.0.static_beta"
    if static_beta in shapes:
        findings["num_residual_streams"] = from_size(shapes, static_beta, 1, 0)
    else:
        findings["num_residual_streams"] = Inferred(1, static_beta, f"{static_beta} is absent")
    return findings


def _infer_ff_mult(shapes: TensorShapes, dim: int, given: object) -> Inferred:
    """Find a multiplier that gives the feed-forward's width: the given one, a round one, or any that does.

    Many multipliers give the same width, and only the width matters.
    """
    key = "layers.0.1.branch.4.weight"
    inner = size_of(shapes, key, 2, 1)
    if not dim or not inner:
        raise UsageError(f"{key} is {list(shapes[key])}.", why="No supported model has an empty tensor.")
    close = 3 * inner / (2 * dim)
    halves = [round(close * parts) / parts for parts in (1, 2, 4, 8, 16)]
    numeric = [float(given)] if isinstance(given, int | float) and abs(given) < 2**30 else []
    candidates = [*numeric, 4.0, *halves, 3 * (inner + 0.5) / (2 * dim)]
    for candidate in candidates:
        if feed_forward_width(dim, candidate) == inner:
            return Inferred(candidate, key, f"{key} is {list(shapes[key])}")
    raise UsageError(f"{key} is {list(shapes[key])}.", why="No ff_mult gives that width.")


def length_unless_given(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Set no longest sequence for a model without embeddings, because nothing limits its length."""
    without = values.get("num_tokens") is None and "max_seq_len" not in values
    return {"max_seq_len": None} if without else {}
