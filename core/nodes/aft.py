"""Define the AFT-local nodes: a gated mean over the whole sequence, with learned biases near the query.

With `T` positions, `B` batch, `D` channels, and `r` how far the biases reach:

    w_ij = position_bias[i, j - i + r] if |j - i| ≤ r else 0
    output_i = σ(gate_i) · Σ_j e^{w_ij + key_j}·value_j / Σ_j e^{w_ij + key_j}   per channel

=================  ==============  ================================================================
`gate, key,        `[T, B, D]`     fp32; a key below -1e29 counts as -1e29
value`
`position_bias`    `[T, R]`        fp32; `R = 2r + 1`, and `R = r + 1` if the node is causal. Entries
                                   whose `j` lies outside the sequence count nothing
`key_mask`         `[B, T]` bool   True = keep; a query that sees no key gives zeros
`output`           `[T, B, D]`     fp32
=================  ==============  ================================================================

In a causal node a query sees the keys `j ≤ i`, in another one all. The keys beyond `r` stay visible, with bias 0. An
implementation subtracts the largest logit a query sees, or one that is at most `WIDEST_BIASES` from it.

Source: `labml_nn.transformers.aft.AFTLocal`, labml-nn 0.5.1; Zhai et al., arXiv 2105.14103.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from .attention import chosen

# The node's ONNX function is exact while no bias (nor 0) is further from another: e^-60 of fp32's e^-87 are left for
# the keys. Trained biases span a few units; modules with wider ones are exported without the node.
WIDEST_BIASES = 60.0

# The logit of a hidden key. Finite, so that no difference of two is NaN; far below any other, so that adding a bias
# does not make the key visible, and a row whose maximum is near it has seen no key.
HIDDEN_KEY = -1e30

# Keys below this one count as this one, -inf among them: far above a hidden key, so that none of those has a weight
# where all keys that a query sees are as low.
LOWEST_KEY = -1e29


@dataclass(frozen=True)
class AftVariant:
    """One op type: whether a query sees later keys, and whether there is a mask."""

    causal: bool
    has_mask: bool

    @property
    def op_type(self) -> str:
        """The name that nodes and their function have."""
        return "".join(("AFTLocal", *chosen(("Causal", self.causal), ("Mask", self.has_mask))))

    @property
    def input_names(self) -> tuple[str, ...]:
        """Inputs in order."""
        return ("gate", "key", "value", "position_bias", *chosen(("key_mask", self.has_mask)))

    def reach(self, columns: int) -> int:
        """Return how far biases with this many columns reach."""
        return columns - 1 if self.causal else (columns - 1) // 2


AFT_VARIANTS = tuple(AftVariant(causal, mask) for causal, mask in product((False, True), repeat=2))
AFT_VARIANT_BY_OP_TYPE = {variant.op_type: variant for variant in AFT_VARIANTS}
