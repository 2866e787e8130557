"""Constructor arguments of `LocalMHA`, with those it passes on to `LocalAttention`.

Source: local-attention 1.11.2; zetascale 2.8.8 has the same.
"""

from __future__ import annotations

from pydantic import model_validator

from ....core.errors import UsageError
from ....core.geometry import WindowGeometry
from ..arguments import Arguments, Count, Flag, OldRotaryConfig, Probability, Real, Size
from ..local_attention.arguments import LocalAttentionArgs


class HeadsArgs(Arguments):
    """Arguments of `LocalMHA` that `LocalTransformer` passes on to it under the same names."""

    dim: Size
    dim_head: Size = 64
    heads: Size = 8
    causal: Flag = False
    qk_rmsnorm: Flag = False
    qk_scale: Real = 8.0
    use_xpos: Flag = False
    xpos_scale_base: Real | None = None
    exact_windowsize: Flag | None = None
    gate_values_per_head: Flag = False
    look_backward: Count = 1
    look_forward: Count | None = None
    shared_qk: Flag = False
    rel_pos_emb_config: OldRotaryConfig | None = None

    def attention_args(self) -> LocalAttentionArgs:
        """Return the arguments of the `LocalAttention` inside."""
        raise NotImplementedError

    def geometry(self) -> WindowGeometry:
        """Return the window of every layer; exact unless `exact_windowsize` is false."""
        return self.attention_args().geometry()

    @property
    def inner_dim(self) -> int:
        """Width of q, of k and of v over all heads."""
        return self.heads * self.dim_head

    @property
    def rotary_dim(self) -> int | None:
        """Channels of a head that the rotary embedding rotates, or None without rotary."""
        return self.attention_args().rotary_dim

    @property
    def xpos_base(self) -> float | None:
        """The base of xpos' exponents, or None where xpos has no effect."""
        return self.attention_args().xpos_base


class LocalMHAArgs(HeadsArgs):
    """Arguments of `LocalMHA`, with those it passes through to `LocalAttention`."""

    window_size: Size
    dropout: Probability = 0.0
    prenorm: Flag = False
    use_rotary_pos_emb: Flag = True

    @model_validator(mode="after")
    def _check(self) -> LocalMHAArgs:
        if self.rotary_dim not in (None, self.dim_head):
            raise UsageError(
                f"rel_pos_emb_config turns {self.rotary_dim} channels of heads {self.dim_head} wide.",
                why="local-attention turns whole heads and fails on any other width.",
                fix="Leave the deprecated rel_pos_emb_config out.",
            )
        return self

    def attention_args(self) -> LocalAttentionArgs:
        """Return the arguments of the `LocalAttention` inside."""
        passed_on = LocalAttentionArgs.model_fields.keys() & LocalMHAArgs.model_fields.keys()
        set_here = {
            "dim": self.dim_head,
            "autopad": True,
            "scale": self.qk_scale if self.qk_rmsnorm else None,
            "exact_windowsize": True if self.exact_windowsize is None else self.exact_windowsize,
        }
        return LocalAttentionArgs(**{name: getattr(self, name) for name in passed_on} | set_here)
