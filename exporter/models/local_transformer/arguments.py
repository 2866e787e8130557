"""Constructor arguments of `LocalTransformer`, with those it passes on to `LocalMHA`.

Source: local-attention 1.11.2.
"""

from __future__ import annotations

from pydantic import model_validator

from ....core.errors import UsageError
from ..arguments import Depth, Factor, Flag, Integer, Probability, Size
from ..local_attention.arguments import LocalAttentionArgs
from ..local_mha.arguments import HeadsArgs, LocalMHAArgs


def feed_forward_width(dim: int, mult: float) -> int:
    """Return the width of the feed-forward's value half, which is also that of its gate half."""
    return int(dim * mult * 2 / 3)


class LocalTransformerArgs(HeadsArgs):
    """Arguments of `LocalTransformer`, with those it passes through to `LocalMHA`.

    `num_tokens` None means embeddings in and embeddings out; only then may `max_seq_len` be None.
    """

    num_tokens: Size | None
    max_seq_len: Size | None
    depth: Depth
    causal: Flag = True
    local_attn_window_size: Size = 512
    ff_mult: Factor = 4.0
    attn_dropout: Probability = 0.0
    ff_dropout: Probability = 0.0
    ignore_index: Integer = -1
    use_dynamic_pos_bias: Flag = False
    # Without global layers it has no effect, but upstream still checks its range.
    layers_insert_global_attn: tuple[Size, ...] | None = None
    num_residual_streams: Size = 4

    @model_validator(mode="after")
    def _check(self) -> LocalTransformerArgs:
        if self.num_tokens is not None and self.max_seq_len is None:
            raise UsageError(
                "max_seq_len is missing.",
                why="A model with token embeddings has that many position embeddings.",
                fix="Give max_seq_len, or num_tokens = null for a model without embeddings.",
            )
        if any(layer > self.depth for layer in self.layers_insert_global_attn or ()):
            raise UsageError(f"layers_insert_global_attn names a layer beyond depth {self.depth}.")
        if self.ff_inner < 1:
            raise UsageError(
                f"ff_mult {self.ff_mult} leaves the feed-forward no channels.",
                why=f"Its width is int({self.dim} * {self.ff_mult} * 2 / 3) = 0.",
            )
        geometry, window = self.geometry(), self.local_attn_window_size
        if self.use_dynamic_pos_bias and geometry.keys_per_window != 2 * window:
            raise UsageError(
                f"use_dynamic_pos_bias with {geometry.look_backward} windows back and {geometry.look_forward} forward.",
                why=f"The bias covers 2 windows ({2 * window} keys); this window gathers "
                f"{geometry.keys_per_window}, and local-attention itself fails.",
                fix="Set look_backward + look_forward to 1 (non-causal: look_forward = 0).",
            )
        return self

    def mha_args(self) -> LocalMHAArgs:
        """Return the arguments of the `LocalMHA` in every layer."""
        return LocalMHAArgs(
            **{name: getattr(self, name) for name in HeadsArgs.model_fields},
            dropout=self.attn_dropout,
            window_size=self.local_attn_window_size,
            # The position bias replaces rotary.
            use_rotary_pos_emb=not self.use_dynamic_pos_bias,
            prenorm=True,
        )

    def attention_args(self) -> LocalAttentionArgs:
        """Return the arguments of the `LocalAttention` in every layer."""
        return self.mha_args().attention_args()

    @property
    def learned_positions(self) -> int | None:
        """Number of positions with a learned embedding; None if the inputs are embeddings and there is no limit."""
        return None if self.num_tokens is None else self.max_seq_len

    @property
    def ff_inner(self) -> int:
        """Width of the feed-forward's value half, which is also that of its gate half."""
        return feed_forward_width(self.dim, self.ff_mult)
