"""Constructor arguments of `LocalTransformer`, with those it passes on to `LocalMHA`.

Source: local-attention 1.11.2.
"""

from __future__ import annotations

from pydantic import model_validator

from ....core.errors import UsageError
from ....core.geometry import WindowGeometry
from ..arguments import Arguments, Count, Depth, Factor, Flag, Integer, OldRotaryConfig, Probability, Real, Size
from ..local_mha.arguments import LocalMHAArgs


def feed_forward_width(dim: int, mult: float) -> int:
    """Width of the feed-forward's value half, and of its gate half."""
    return int(dim * mult * 2 / 3)


class LocalTransformerArgs(Arguments):
    """Arguments of `LocalTransformer`, with those it passes through to `LocalMHA`.

    `num_tokens` None means embeddings in and embeddings out; only then may `max_seq_len` be None.
    """

    num_tokens: Size | None
    max_seq_len: Size | None
    dim: Size
    depth: Depth
    causal: Flag = True
    local_attn_window_size: Size = 512
    dim_head: Size = 64
    heads: Size = 8
    ff_mult: Factor = 4.0
    attn_dropout: Probability = 0.0
    ff_dropout: Probability = 0.0
    ignore_index: Integer = -1
    use_xpos: Flag = False
    xpos_scale_base: Real | None = None
    use_dynamic_pos_bias: Flag = False
    # Without a global layer it has no effect; upstream only checks its range.
    layers_insert_global_attn: tuple[Size, ...] | None = None
    num_residual_streams: Size = 4
    qk_rmsnorm: Flag = False
    qk_scale: Real = 8.0
    exact_windowsize: Flag | None = None
    gate_values_per_head: Flag = False
    look_backward: Count = 1
    look_forward: Count | None = None
    shared_qk: Flag = False
    rel_pos_emb_config: OldRotaryConfig | None = None

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
        self._check_position_bias(self.geometry())
        return self

    def _check_position_bias(self, geometry: WindowGeometry) -> None:
        window = self.local_attn_window_size
        if self.use_dynamic_pos_bias and geometry.keys_per_window != 2 * window:
            raise UsageError(
                f"use_dynamic_pos_bias with {geometry.look_backward} windows back and {geometry.look_forward} forward.",
                why=f"The bias covers 2 windows ({2 * window} keys); this window gathers "
                f"{geometry.keys_per_window}, and local-attention itself fails.",
                fix="Set look_backward + look_forward to 1 (non-causal: look_forward = 0).",
            )

    def mha_args(self) -> LocalMHAArgs:
        """The arguments of the `LocalMHA` in every layer."""
        return LocalMHAArgs(
            dim=self.dim,
            dim_head=self.dim_head,
            heads=self.heads,
            dropout=self.attn_dropout,
            causal=self.causal,
            window_size=self.local_attn_window_size,
            use_xpos=self.use_xpos,
            xpos_scale_base=self.xpos_scale_base,
            # The position bias replaces rotary.
            use_rotary_pos_emb=not self.use_dynamic_pos_bias,
            prenorm=True,
            qk_rmsnorm=self.qk_rmsnorm,
            qk_scale=self.qk_scale,
            exact_windowsize=self.exact_windowsize,
            gate_values_per_head=self.gate_values_per_head,
            look_backward=self.look_backward,
            look_forward=self.look_forward,
            shared_qk=self.shared_qk,
            rel_pos_emb_config=self.rel_pos_emb_config,
        )

    def geometry(self) -> WindowGeometry:
        """The window of every layer."""
        return self.mha_args().geometry()

    @property
    def ff_inner(self) -> int:
        """Width of the feed-forward's value half, and of its gate half."""
        return feed_forward_width(self.dim, self.ff_mult)

    @property
    def position_bias_dim(self) -> int:
        """Hidden width of the dynamic position bias."""
        return self.dim // 2

    @property
    def rotary_dim(self) -> int | None:
        """Channels of a head the rotary embedding turns, or None without rotary."""
        return self.mha_args().rotary_dim

    @property
    def xpos_base(self) -> float | None:
        """The base of xpos' exponents, or None where xpos has no effect."""
        return self.mha_args().xpos_base

    @property
    def score_scale(self) -> float:
        """What q is multiplied by."""
        return self.mha_args().score_scale
