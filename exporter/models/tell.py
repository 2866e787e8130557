"""What the names and shapes of a state dict tell about the constructor arguments it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.errors import UsageError
from ..checkpoint.config import Kind
from .arguments import feed_forward_width
from .shapes import INV_FREQ, Shapes

_LAYER = re.compile(r"layers\.([0-9]{1,6})\.")


@dataclass(frozen=True)
class Told:
    """One argument's value, and the entry of the state dict that tells it (present or absent)."""

    value: Any
    key: str
    how: str


Findings = dict[str, Told]


def told_kind(shapes: Shapes) -> Kind:
    """Which kind of class the names belong to.

    Raises:
        UsageError: none of them, or a transformer with global layers.
    """
    if any(name.startswith("global_layers.") for name in shapes):
        raise UsageError(
            "The checkpoint has global attention layers (global_layers.*).",
            why="They are torch modules of any kind, which nothing here can rebuild.",
            fix="Only models without global_attn_layer are supported.",
        )
    if any(name.startswith(("layers.", "token_emb.", "pos_emb.")) for name in shapes):
        return "transformer"
    if "to_qkv.weight" in shapes:
        return "mha"
    if "pos_bias" in shapes:
        return "aft"
    if set(shapes) <= {INV_FREQ}:
        return "attention"
    raise UsageError(
        f"The checkpoint is of no supported class: it has {bounded(list(shapes), 5)}.",
        why="LocalTransformer has layers.*, LocalMHA to_qkv.weight, AFTLocal pos_bias, "
        "LocalAttention at most rel_pos.inv_freq.",
        fix="If the model is a part of a larger one, name the prefix of its weights.",
    )


def tell(kind: Kind, shapes: Shapes, given: Mapping[str, Any]) -> Findings:
    """The arguments that `shapes` tell; `given` ones only help where two would fit equally.

    Raises:
        UsageError: a tensor with the wrong number of axes, or sizes that no argument produces.
    """
    tellers: dict[Kind, Callable[[Shapes, Mapping[str, Any]], Findings]] = {
        "attention": _tell_attention,
        "mha": _tell_mha,
        "transformer": _tell_transformer,
        "aft": _tell_aft,
    }
    return tellers[kind](shapes, given)


def bounded(names: list[str], limit: int = 10) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(name[:100] for name in names[:limit]) + more


def _size(shapes: Shapes, key: str, axes: int, axis: int) -> int:
    """One size of a tensor that must be there with that many axes."""
    shape = shapes.get(key)
    if shape is None:
        raise UsageError(
            f"The checkpoint has no {key}.",
            why="The other sizes follow from it.",
            fix="Save the whole state dict of the model.",
        )
    if len(shape) != axes:
        raise UsageError(f"{key} is {list(shape)}.", why=f"It has {axes} axes in every supported model.")
    return shape[axis]


def _sized(shapes: Shapes, key: str, axes: int, axis: int, per_unit: int = 1) -> Told:
    value = _size(shapes, key, axes, axis) * per_unit
    return Told(value, key, f"{key} is {list(shapes[key])}")


def _present(shapes: Shapes, key: str) -> Told:
    present = key in shapes
    return Told(present, key, f"{key} is {'present' if present else 'absent'}")


def _tell_attention(shapes: Shapes, given: Mapping[str, Any]) -> Findings:
    """Absent frequencies tell nothing here: rotary is on if the config gives `dim`."""
    if INV_FREQ not in shapes:
        return {}
    findings = {"use_rotary_pos_emb": _present(shapes, INV_FREQ)}
    if given.get("rel_pos_emb_config") is None:
        findings["dim"] = _sized(shapes, INV_FREQ, 1, 0, per_unit=2)
    return findings


def _tell_aft(shapes: Shapes, given: Mapping[str, Any]) -> Findings:
    return {
        "d_model": _sized(shapes, "query.weight", 2, 1),
        "seq_len": _sized(shapes, "pos_bias", 2, 0),
        "bias": _present(shapes, "query.bias"),
    }


def _tell_mha(shapes: Shapes, given: Mapping[str, Any], prefix: str = "") -> Findings:
    inv_freq = f"{prefix}attn_fn.{INV_FREQ}"
    findings = {
        "dim": _sized(shapes, f"{prefix}to_qkv.weight", 2, 1),
        "prenorm": _present(shapes, f"{prefix}norm.weight"),
        "qk_rmsnorm": _present(shapes, f"{prefix}q_scale"),
        "gate_values_per_head": _present(shapes, f"{prefix}to_v_gate.0.weight"),
    }
    # A state dict without its buffers is rotary all the same if the config says so.
    if inv_freq in shapes or given.get("use_rotary_pos_emb") is not True:
        findings["use_rotary_pos_emb"] = _present(shapes, inv_freq)
    return findings | _tell_heads(shapes, given, prefix)


def _tell_heads(shapes: Shapes, given: Mapping[str, Any], prefix: str) -> Findings:
    """`heads` and `dim_head`: their product is in `to_qkv`, one of them elsewhere or given."""
    to_qkv = f"{prefix}to_qkv.weight"
    inner, rest = divmod(_size(shapes, to_qkv, 2, 0), 3)
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
            findings[name] = _sized(shapes, key, axes, 0, per_unit)
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
        findings[other] = Told(inner // value, to_qkv, how)
    return findings


def _tell_transformer(shapes: Shapes, given: Mapping[str, Any]) -> Findings:
    findings = _tell_layers(shapes)
    attention = _tell_mha(shapes, {**given, "use_rotary_pos_emb": None}, prefix="layers.0.0.branch.")
    # LocalTransformer decides these two itself.
    del attention["prenorm"], attention["use_rotary_pos_emb"]
    findings |= attention
    findings["use_dynamic_pos_bias"] = _present(shapes, "dynamic_pos_bias.mlp.0.weight")
    if "token_emb.weight" in shapes:
        findings["num_tokens"] = _sized(shapes, "token_emb.weight", 2, 0)
        findings["max_seq_len"] = _sized(shapes, "pos_emb.weight", 2, 0)
    else:
        findings["num_tokens"] = Told(None, "token_emb.weight", "token_emb.weight is absent")
    findings["ff_mult"] = _tell_ff_mult(shapes, findings["dim"].value, given.get("ff_mult"))
    return findings


def _tell_layers(shapes: Shapes) -> Findings:
    indices = {int(match[1]) for name in shapes if (match := _LAYER.match(name))}
    depth = max(indices, default=-1) + 1
    if depth != len(indices):
        absent = next(index for index in range(depth) if index not in indices)
        raise UsageError(f"The checkpoint has a layer {depth - 1} but no layer {absent}.")
    last = f"layers.{depth - 1}"
    findings = {"depth": Told(depth, f"{last}.0.branch.to_qkv.weight", f"{last} is the last layer")}
    static_beta = "layers.0.0.static_beta"
    if static_beta in shapes:
        findings["num_residual_streams"] = _sized(shapes, static_beta, 1, 0)
    else:
        findings["num_residual_streams"] = Told(1, static_beta, f"{static_beta} is absent")
    return findings


def _tell_ff_mult(shapes: Shapes, dim: int, given: object) -> Told:
    """A multiplier that gives the feed-forward's width: the given one, a round one, or any that does.

    Many multipliers give the same width, and only the width matters.
    """
    key = "layers.0.1.branch.4.weight"
    inner = _size(shapes, key, 2, 1)
    if not dim or not inner:
        raise UsageError(f"{key} is {list(shapes[key])}.", why="No supported model has an empty tensor.")
    close = 3 * inner / (2 * dim)
    halves = [round(close * parts) / parts for parts in (1, 2, 4, 8, 16)]
    numeric = [float(given)] if isinstance(given, int | float) and abs(given) < 2**30 else []
    candidates = [*numeric, 4.0, *halves, 3 * (inner + 0.5) / (2 * dim)]
    for candidate in candidates:
        if feed_forward_width(dim, candidate) == inner:
            return Told(candidate, key, f"{key} is {list(shapes[key])}")
    raise UsageError(f"{key} is {list(shapes[key])}.", why="No ff_mult gives that width.")
