"""Check whether a node of this project's domains has the attributes that its contract requires."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..error_texts import shown
from ..errors import UsageError
from .aft import AFT_VARIANT_BY_OP_TYPE
from .attention import (
    DOMAIN,
    HEADS_FIRST,
    PLUGIN_ATTRIBUTES,
    SEQUENCE_FIRST,
    VARIANT_BY_OP_TYPE,
    NodeVariant,
    geometry_of,
    xpos_problem,
)
from .fused import FUSED_BY_OP_TYPE, FUSED_DOMAIN
from .grouped import GROUPED_BY_OP_TYPE, GroupedVariant
from .step import STEP_VARIANT_BY_OP_TYPE, StepVariant

_AttentionVariant = NodeVariant | GroupedVariant | StepVariant
_VARIANTS: Mapping[str, _AttentionVariant] = {
    **VARIANT_BY_OP_TYPE,
    **GROUPED_BY_OP_TYPE,
    **STEP_VARIANT_BY_OP_TYPE,
}
# Longest window. A window gathers at most twice as many keys, so that products of a few such sizes fit in 64 bits.
_LONGEST_WINDOW = 2**31


@dataclass(frozen=True)
class _Rule:
    """The requirement for one attribute: in words, and as a test of its Python value."""

    wanted: str
    holds: Callable[[Any], bool]


def _integer(least: int, most: int) -> _Rule:
    return _Rule(f"an integer from {least} to {most}", lambda x: type(x) is int and least <= x <= most)


def _number(wanted: str = "", holds: Callable[[float], bool] = lambda x: True) -> _Rule:
    return _Rule(f"a finite number{wanted}", lambda x: isinstance(x, float) and math.isfinite(x) and holds(x))


_FLAG = _integer(0, 1)
_TEXT = _Rule("text", lambda x: isinstance(x, str))
_PERMS = (list(SEQUENCE_FIRST), list(HEADS_FIRST))
_RULES = {
    "window_size": _integer(1, _LONGEST_WINDOW),
    "look_backward": _integer(0, _LONGEST_WINDOW),
    "look_forward": _integer(0, _LONGEST_WINDOW),
    "causal": _FLAG,
    "exact_windowsize": _FLAG,
    "scale": _number(),
    "softcap": _number(" above 0", lambda x: x > 0),
    "shared_qk": _FLAG,
    "xpos_scale_base": _number(),
    "plugin_namespace": _TEXT,
    "plugin_version": _TEXT,
    "perm": _Rule(
        "the integers [0, 2, 1, 3] or [0, 1, 2, 3]",
        lambda x: x in _PERMS and all(type(axis) is int for axis in x),
    ),
    "query_block": _integer(1, _LONGEST_WINDOW),
}
_RULES_WITH_XPOS = _RULES | {"xpos_scale_base": _number(" other than 0", lambda x: x != 0)}


def check_attributes(domain: str, op_type: str, attributes: Mapping[str, Any], head_dim: int | None = None) -> None:
    """Refuse attributes that do not fit the contract of their node; nodes without a contract here pass.

    Args:
        domain: domain of the node.
        op_type: op type of the node.
        attributes: its attributes as Python values: int, float, str, a list of numbers, or None for anything else.
        head_dim: the width of its heads, where it is known.

    Raises:
        UsageError: an attribute is missing, of the wrong type or out of range. Its first line names the attribute.
    """
    if domain == FUSED_DOMAIN and op_type in FUSED_BY_OP_TYPE:
        _check_fixed(op_type, attributes, {})
    elif domain == DOMAIN and op_type in AFT_VARIANT_BY_OP_TYPE:
        _check_fixed(op_type, attributes, PLUGIN_ATTRIBUTES)
    elif domain == DOMAIN and op_type in _VARIANTS:
        _check_attention(_VARIANTS[op_type], attributes, head_dim)


def _check_fixed(op_type: str, attributes: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse any attribute other than these, or with another value; a node may lack them."""
    for name, value in attributes.items():
        if name not in known or known[name] != value:
            raise UsageError(f"{op_type} has no attribute {shown(name)} with this value.")


def _check_attention(variant: _AttentionVariant, attributes: Mapping[str, Any], head_dim: int | None) -> None:
    """Refuse attributes of an attention node that are missing, of the wrong type or out of range."""
    for name in variant.attribute_names:
        rule = (_RULES_WITH_XPOS if variant.has_xpos else _RULES)[name]
        if name not in attributes:
            raise UsageError(f"Attribute {name} is missing; it must be {rule.wanted}.")
        if not rule.holds(attributes[name]):
            found = "neither number nor text" if attributes[name] is None else shown(attributes[name])
            raise UsageError(f"Attribute {name} is {found}; it must be {rule.wanted}.")
    if isinstance(variant, GroupedVariant) and variant.sees_all:
        return
    geometry = geometry_of(attributes)
    if geometry.keys_per_window > 2 * _LONGEST_WINDOW:
        raise UsageError(
            f"Attributes look_backward and look_forward give {shown(geometry.keys_per_window)} keys per window; "
            f"at most {2 * _LONGEST_WINDOW} are allowed."
        )
    if variant.has_xpos and head_dim is not None and xpos_problem(head_dim):
        raise UsageError(f"Attribute xpos_scale_base: {xpos_problem(head_dim)}")
