"""Define the grouped nodes: attention whose query heads share heads of keys and values.

`GroupedWindowedAttention` sees a window, like `WindowedAttention`; `GlobalAttention` sees all keys, if causal those up
to the query. Both may cap their scores and have sinks. What differs in inputs or in the function's operators is an op
type of its own: after the base name comes `Mask`, `Softcap` and `Sinks`, in this order.

Shapes, with `B` batch, `N` sequence length, `H` heads, `G` of them for each of the `H/G` heads of keys, `D` head size:

=================  ============================  ===================================================
`query`            `[B, N, H, D]` or             fp32, fp16 or bf16; `perm` says which layout;
                   `[B, H, N, D]`                already rotated
`key, value`       `[B, N, H/G, D]` or           as `query`; head `h` of the queries has head `h // G`
                   `[B, H/G, N, D]`              of them
`key_mask`         `[B, N]` bool                 True = keep; a query none of whose visible keys is
                                                 kept gives zeros
`sinks`            `[H]`                         type of `query`; a logit that joins the softmax's sum
                                                 and has no value
output             as `query`                    `Σ_s e^(x_s)·v_s / (Σ_s e^(x_s) + e^sink)` over the
                                                 visible keys, `x = scale·q·kᵀ`, capped:
                                                 `softcap·tanh(scale·q·kᵀ / softcap)`
=================  ============================  ===================================================

Softcap: Gemma 2 (arXiv 2408.00118). Sinks: gpt-oss, after "Efficient Streaming Language Models with Attention Sinks"
(arXiv 2309.17453).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from ..geometry import WindowGeometry
from .attention import (
    PLUGIN_ATTRIBUTES,
    SEQUENCE_FIRST,
    WINDOW_ATTRIBUTES,
    choose_query_block,
    chosen,
    stored_attributes,
)

WINDOWED, GLOBAL = "GroupedWindowedAttention", "GlobalAttention"


@dataclass(frozen=True)
class GroupedVariant:
    """One op type: what it sees, which optional inputs it has, and whether it caps its scores."""

    sees_all: bool = False
    has_mask: bool = False
    has_softcap: bool = False
    has_sinks: bool = False

    # Inputs and options that only WindowedAttention has.
    has_bias = has_xpos = False

    @property
    def op_type(self) -> str:
        """The name that nodes and their function have."""
        options = chosen(("Mask", self.has_mask), ("Softcap", self.has_softcap), ("Sinks", self.has_sinks))
        return "".join((GLOBAL if self.sees_all else WINDOWED, *options))

    @property
    def input_names(self) -> tuple[str, ...]:
        """Inputs in order."""
        return ("query", "key", "value", *chosen(("key_mask", self.has_mask), ("sinks", self.has_sinks)))

    @property
    def attribute_names(self) -> tuple[str, ...]:
        """Attributes, in order."""
        window = ("causal",) if self.sees_all else WINDOW_ATTRIBUTES
        cap = chosen(("softcap", self.has_softcap))
        return (*window, "scale", "perm", "query_block", *cap, *PLUGIN_ATTRIBUTES)


GROUPED_VARIANTS = tuple(
    GroupedVariant(sees_all, mask, softcap, sinks)
    for sees_all, sinks, softcap, mask in product((False, True), repeat=4)
)
GROUPED_BY_OP_TYPE = {variant.op_type: variant for variant in GROUPED_VARIANTS}


@dataclass(frozen=True)
class GroupedAttributes:
    """Attributes of one node.

    Args:
        geometry: which keys a query sees; `WindowGeometry.all_keys` for `GlobalAttention`.
        scale: factor of the scores.
        softcap: most that a score can be, 0 without a cap.
        perm: permutation from the inputs' layout to `[B, H, N, D]`.
        query_block: how many queries the ONNX function takes at a time; kernels ignore it.
    """

    geometry: WindowGeometry
    scale: float
    softcap: float = 0.0
    perm: tuple[int, ...] = SEQUENCE_FIRST
    query_block: int = 64

    def variant(self, *, has_mask: bool, has_sinks: bool) -> GroupedVariant:
        """Return the op type of a node with these attributes and inputs."""
        return GroupedVariant(self.geometry.sees_all, has_mask, bool(self.softcap), has_sinks)

    def as_onnx(self) -> dict[str, Any]:
        """Return names and values as the node stores them."""
        return stored_attributes(self, self.variant(has_mask=False, has_sinks=False).attribute_names)


# Queries that GlobalAttention's function takes at a time: more make larger products, and larger scores.
_GLOBAL_BLOCK = 64
# Number of blocks of a short sequence, so that its scores are not n × n.
_FEWEST_BLOCKS = 4


def choose_grouped_block(geometry: WindowGeometry, length: int | None) -> int:
    """Choose how many queries the ONNX function takes per block; `length` is None if it is dynamic."""
    if not geometry.sees_all:
        block = choose_query_block(geometry, length, has_bias=False)
        # A block-local window is one block, and a short sequence only a part of one.
        return block if length is None else max(1, min(block, length))
    if length is None or length >= _FEWEST_BLOCKS * _GLOBAL_BLOCK:
        return _GLOBAL_BLOCK
    return max(1, length // _FEWEST_BLOCKS)
