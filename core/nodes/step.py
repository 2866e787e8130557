"""Define the step nodes: windowed attention that continues from a ring buffer of keys and values.

One call takes the next `C` tokens of a sequence and the ring that the tokens before them left; it gives
their outputs and the ring as the next call needs it. The key of position `s` lies in slot `s mod R`, and the ring
has exactly as many slots as a query sees keys at most:

================  ==============  ===================================================================
                  `R`             visible to the query at `t`, besides `s ≤ t`
================  ==============  ===================================================================
exact             `b·w + 1`       `s ≥ t - b·w`
block-local       `(b + 1)·w`     `s ≥ (t // w - b)·w`
================  ==============  ===================================================================

`WindowedAttentionStep` takes one token. It writes first and attends to the ring it has written, so input
and output cache may be one buffer. `WindowedAttentionChunk` takes several: the chunk's early queries need keys
whose slots its late keys take, so it attends to the old ring and the new keys side by side, and writes last.

Values that depend only on the position are inputs: the graph computes them once for all layers, and an
implementation needs no geometry. With `B` batch, `H` heads, `D` head size and `V` the keys attended to (`R`
for a step, `R + C` for a chunk):

=======================  =================  =========================================================
`query, key, value`      `[B, H, C, D]`     fp32, fp16 or bf16; rotated at their absolute positions,
                                            key already normalised if `shared_qk`
`key_cache,              `[B, H, R, D]`     slots that no key was written to yet hold any finite number
value_cache`
`score_bias`             `[C, V]` or        fp32, added to the scores: -2e30 where a query does not see a
                         `[H, C, V]`        key, `SELF_SCORE` on itself if `shared_qk`, else 0 or the
                                            model's own bias
`write_index`            int64              step: `[B, H, 1, 3]`, batch, head and slot the new key goes to;
                                            chunk: `[R]`, which of the `V` keys each slot holds afterwards
`query_scale,            `[C, D]`,          xpos only, fp32: `ζ^(t / base)` and `ζ^(-s / base)`, counted from
key_scale`               `[V, D]`           where neither overflows; a step has `key_scale` only
`output`                 `[B, H, C, D]`     `softmax(scale·q·kᵀ + score_bias)·v`
`next_key_cache,         `[B, H, R, D]`     the ring with the new keys and values
next_value_cache`
=======================  =================  =========================================================

`GroupedWindowedAttentionStep` and `…Chunk` share heads of keys, as `core.nodes.grouped` does; after the name comes
`Softcap` and `Sinks`. They differ in these:

=======================  =================  =========================================================
`key, value`, caches     `[B, KV, …, D]`    `H / KV` heads of queries share a head of keys
`score_bias`             `[C, V]` or        the second where padding hides other keys in each sequence
                         `[B, 1, C, V]`
`write_index`            int64              as above, with `KV` heads: `[B, KV, 1, 3]` or `[R]`
`sinks`                  `[H]`              type of `query`; a logit that joins the softmax's sum
=======================  =================  =========================================================

A layer without a window has a ring of as many slots as the file has positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from ..geometry import WindowGeometry
from .attention import PLUGIN_ATTRIBUTES, WINDOW_ATTRIBUTES, chosen, stored_attributes

STEP, CHUNK = "WindowedAttentionStep", "WindowedAttentionChunk"
GROUPED = "Grouped"


@dataclass(frozen=True)
class StepVariant:
    """One op type: whether it takes chunks, scales by xpos, shares heads of keys, caps its scores or has sinks."""

    chunked: bool
    has_xpos: bool = False
    grouped: bool = False
    has_softcap: bool = False
    has_sinks: bool = False

    @property
    def op_type(self) -> str:
        """The name that nodes and their function have."""
        before = chosen((GROUPED, self.grouped))
        options = chosen(("Xpos", self.has_xpos), ("Softcap", self.has_softcap), ("Sinks", self.has_sinks))
        return "".join((*before, CHUNK if self.chunked else STEP, *options))

    @property
    def input_names(self) -> tuple[str, ...]:
        """Inputs in order."""
        names = ("query", "key", "value", "key_cache", "value_cache", "score_bias", "write_index")
        scales = chosen(("query_scale", self.has_xpos and self.chunked), ("key_scale", self.has_xpos))
        return (*names, *scales, *chosen(("sinks", self.has_sinks)))

    @property
    def attribute_names(self) -> tuple[str, ...]:
        """Attributes, in order."""
        own = chosen(("softcap", self.has_softcap)) if self.grouped else ("shared_qk", "xpos_scale_base")
        return (*WINDOW_ATTRIBUTES, "scale", *own, *PLUGIN_ATTRIBUTES)


STEP_VARIANTS = (
    *(StepVariant(chunked, xpos) for chunked, xpos in product((False, True), repeat=2)),
    *(
        StepVariant(chunked, grouped=True, has_softcap=softcap, has_sinks=sinks)
        for chunked, sinks, softcap in product((False, True), repeat=3)
    ),
)
STEP_VARIANT_BY_OP_TYPE = {variant.op_type: variant for variant in STEP_VARIANTS}


def ring_slots(geometry: WindowGeometry) -> int:
    """Return `R`, the most keys that any query of a causal window sees."""
    reach = geometry.backward_reach
    return reach + (1 if geometry.exact_windowsize else geometry.window_size)


@dataclass(frozen=True)
class StepAttributes:
    """Attributes of one step node, as in `core.nodes.attention.NodeAttributes`; the mathematics needs `scale` only.

    Args:
        geometry: a causal window.
        scale: factor of the scores.
        shared_qk: a token's score with itself becomes `SELF_SCORE`.
        xpos_scale_base: base of the xpos decay, 0 without.
        softcap: most that a score can be, 0 without a cap; of grouped nodes only.
    """

    geometry: WindowGeometry
    scale: float
    shared_qk: bool = False
    xpos_scale_base: float = 0.0
    softcap: float = 0.0

    def as_onnx(self, variant: StepVariant | None = None) -> dict[str, Any]:
        """Return names and values as a node of this op type stores them; by default, of nodes without shared heads."""
        return stored_attributes(self, (variant or StepVariant(chunked=False)).attribute_names)
