"""Define the WindowedAttention node: its names, inputs and attributes.

The exporter writes it, its ONNX function implements it in standard operators, kernels and plugins
implement it natively, reports read it back. One entry here is one op type: variants that differ in
their inputs have different names, because TensorRT finds a plugin, and ONNX a function, by name only.

Shapes, with `B` batch, `N` sequence length, `H` heads, `D` head size and `K` keys per window:

=================  ==========================  =====================================================
`query, key,       `[B, N, H, D]` or           fp32, fp16 or bf16; `perm` says which layout;
value`             `[B, H, N, D]`              already rotated, key normalised if `shared_qk`
`key_mask`         `[B, N]` bool               True = keep; a query none of whose visible keys is
                                               kept gives zeros
`attn_bias`        `[H, window_size, K]`       type of `query`; added to the scores of a query at
                                               `t % w` and a key at slot `s - (t//w - look_backward)·w`
output             as `query`                  `softmax(scale·q·kᵀ + …)·v` over the visible keys
=================  ==========================  =====================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..errors import UsageError
from ..geometry import WindowGeometry

DOMAIN = "localattn"
DOMAIN_VERSION = 1
PLUGIN_NAMESPACE = "localattn"
PLUGIN_VERSION = "1"
# Attributes of every node that plugins compute; because of them TensorRT prefers the plugin to the function.
PLUGIN_ATTRIBUTES: dict[str, Any] = {"plugin_namespace": PLUGIN_NAMESPACE, "plugin_version": PLUGIN_VERSION}
# Attributes that describe a window.
WINDOW_ATTRIBUTES = ("window_size", "look_backward", "look_forward", "causal", "exact_windowsize")

# The score of a token with itself when query and key share their projection (upstream's
# TOKEN_SELF_ATTN_VALUE): low enough to vanish next to any other key, but above every masked key.
SELF_SCORE = -5e4

# Lower biases (-inf too) are raised to this: they hide a key if there is any other, and make no row NaN.
LOWEST_BIAS = -1e30

# The score of a key outside the window; finite, so that no row becomes NaN.
OUTSIDE_SCORE = -2e30

# Permutations from the layout of query, key and value to [B, H, N, D]; each is its own inverse.
SEQUENCE_FIRST = (0, 2, 1, 3)
HEADS_FIRST = (0, 1, 2, 3)


def chosen(*options: tuple[str, bool]) -> tuple[str, ...]:
    """Return the names of the options that are chosen, in order."""
    return tuple(name for name, is_chosen in options if is_chosen)


@dataclass(frozen=True)
class NodeVariant:
    """One op type: which optional inputs it has, and whether it scales by xpos."""

    has_mask: bool = False
    has_bias: bool = False
    has_xpos: bool = False

    @property
    def op_type(self) -> str:
        """The name that nodes and their function have."""
        options = chosen(("Mask", self.has_mask), ("Bias", self.has_bias), ("Xpos", self.has_xpos))
        return "".join(("WindowedAttention", *options))

    @property
    def input_names(self) -> tuple[str, ...]:
        """Inputs in order."""
        return ("query", "key", "value", *chosen(("key_mask", self.has_mask), ("attn_bias", self.has_bias)))

    @property
    def attribute_names(self) -> tuple[str, ...]:
        """Attributes, in order; the same for every variant."""
        own = ("scale", "shared_qk", "perm", "query_block", "xpos_scale_base")
        return (*WINDOW_ATTRIBUTES, *own, *PLUGIN_ATTRIBUTES)


VARIANTS = tuple(NodeVariant(mask, bias, xpos) for xpos, bias, mask in product((False, True), repeat=3))
VARIANT_BY_OP_TYPE = {variant.op_type: variant for variant in VARIANTS}


@dataclass(frozen=True)
class NodeAttributes:
    """Attributes of one node.

    Args:
        geometry: which keys a query sees.
        scale: factor of the scores.
        shared_qk: a token's score with itself becomes `SELF_SCORE`, whatever the bias.
        perm: permutation from the inputs' layout to `[B, H, N, D]`.
        query_block: how many queries the ONNX function takes at a time; kernels ignore it.
        xpos_scale_base: base of the xpos decay, 0 without xpos. Channel `c` of the scores is scaled by
            `ζ_c^((t - s + f·w) / base)` with `ζ_c = (2c + 0.4·D) / (1.4·D)`, `c < D/2`, both halves alike.
    """

    geometry: WindowGeometry
    scale: float
    shared_qk: bool = False
    perm: tuple[int, ...] = SEQUENCE_FIRST
    query_block: int = 64
    xpos_scale_base: float = 0.0

    def as_onnx(self) -> dict[str, Any]:
        """Return names and values as the node stores them."""
        return stored_attributes(self, NodeVariant().attribute_names)


def xpos_problem(head_dim: int) -> str:
    """Return why xpos cannot scale heads of this width, or "" if it can."""
    if head_dim >= 2 and head_dim % 2 == 0:
        return ""
    return f"the head size is {head_dim}, but xpos scales channels in pairs and needs an even size."


def check_xpos(head_dim: int) -> None:
    """Refuse heads that xpos cannot scale.

    Raises:
        UsageError: the width is odd or below 2.
    """
    if xpos_problem(head_dim):
        raise UsageError(
            f"xpos cannot be used: the heads are {head_dim} wide.",
            why="It scales channels in pairs.",
            fix="Use heads of an even width, or no xpos.",
        )


# The Python type in which a node stores an attribute; every other is an integer, flags too.
_STORED_AS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("scale", "softcap", "xpos_scale_base"), float),
    **dict.fromkeys(PLUGIN_ATTRIBUTES, str),
    "perm": list,
}


def stored_attributes(attributes: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the attributes of these names as a node stores them; `geometry_of` reads a geometry back.

    Args:
        attributes: `NodeAttributes` or another dataclass with a `geometry`; the fields of both are attributes.
        names: `attribute_names` of the node's op type.
    """
    values = {**vars(attributes.geometry), **vars(attributes), **PLUGIN_ATTRIBUTES}
    return {name: _STORED_AS.get(name, int)(values[name]) for name in names}


def geometry_of(attributes: Mapping[str, Any]) -> WindowGeometry:
    """Return the geometry that a node's attributes (as read from a file) describe.

    Raises:
        KeyError: an attribute of the window is missing.
        UsageError: the attributes describe no valid window.
    """
    if attributes.keys() & WINDOW_ATTRIBUTES == {"causal"}:  # a node that sees all keys
        return WindowGeometry.all_keys(causal=bool(attributes["causal"]))
    return WindowGeometry(
        window_size=int(attributes["window_size"]),
        look_backward=int(attributes["look_backward"]),
        look_forward=int(attributes["look_forward"]),
        causal=bool(attributes["causal"]),
        exact_windowsize=bool(attributes["exact_windowsize"]),
    )


# Queries per block by reach (positions seen before and after a query): from this reach on, this block.
_BLOCK_BY_REACH = ((256, 128), (33, 64), (0, 32))
_LARGEST_BLOCK = 128


def choose_query_block(geometry: WindowGeometry, length: int | None, *, has_bias: bool) -> int:
    """Choose how many queries the ONNX function takes per block.

    A block-local window needs the whole window's keys, and an additive bias is laid out per window, so
    there the block is the window. Exact windows are free: small blocks waste fewer masked scores, large ones
    make better matrix products and repeat fewer keys; `_BLOCK_BY_REACH` is what was fastest on the CPU, and a
    divisor of the length near it (if the length is known) saves padding.
    """
    reaches = geometry.keys_per_window > geometry.window_size
    if has_bias or not geometry.exact_windowsize or not reaches:
        return geometry.window_size
    reach = geometry.backward_reach + geometry.forward_reach
    best = next(block for least, block in _BLOCK_BY_REACH if reach >= least)
    if length is None:
        return best
    if length <= best:
        return length
    divisors = [size for size in range(best // 2, min(2 * best, _LARGEST_BLOCK) + 1) if length % size == 0]
    return min(divisors, key=lambda size: abs(size - best), default=best)
