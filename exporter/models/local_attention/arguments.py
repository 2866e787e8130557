"""Constructor arguments of `LocalAttention`, with upstream's names, defaults and resolution.

Source: local-attention 1.11.2; zetascale 2.8.8 has the same.
"""

from __future__ import annotations

from pydantic import model_validator

from ....core.errors import UsageError
from ....core.geometry import WindowGeometry
from ..arguments import Arguments, Count, Flag, OldRotaryConfig, Probability, Real, Size


class LocalAttentionArgs(Arguments):
    """Arguments of `LocalAttention`; `dim` is the width of one head and only turns rotary on."""

    window_size: Size
    causal: Flag = False
    look_backward: Count = 1
    look_forward: Count | None = None
    dropout: Probability = 0.0
    shared_qk: Flag = False
    rel_pos_emb_config: OldRotaryConfig | None = None
    dim: Size | None = None
    autopad: Flag = False
    exact_windowsize: Flag = False
    scale: Real | None = None
    use_rotary_pos_emb: Flag = True
    use_xpos: Flag = False
    xpos_scale_base: Real | None = None

    @model_validator(mode="after")
    def _check(self) -> LocalAttentionArgs:
        self.geometry()
        if self.rotary_dim is not None and self.rotary_dim % 2:
            raise UsageError(
                f"The rotary width is {self.rotary_dim}, an odd number.",
                why="Rotary embeddings turn channels in pairs.",
                fix="Give an even head width, or use_rotary_pos_emb = false.",
            )
        if self.xpos_base == 0:
            raise UsageError(
                f"use_xpos has a scale base of 0 (window_size {self.window_size}).",
                why="The base is xpos_scale_base or window_size // 2; divided by 0, every output is NaN.",
                fix="Set xpos_scale_base to the value the model was trained with, or use_xpos to false.",
            )
        return self

    def geometry(self) -> WindowGeometry:
        """Return the window; by default `look_forward` is 0 if causal, else 1."""
        forward = self.look_forward
        if forward is None:
            forward = 0 if self.causal else 1
        return WindowGeometry(
            window_size=self.window_size,
            look_backward=self.look_backward,
            look_forward=forward,
            causal=self.causal,
            exact_windowsize=self.exact_windowsize,
        )

    @property
    def rotary_dim(self) -> int | None:
        """Channels that the rotary embedding rotates (the whole head), or None without rotary."""
        if not self.use_rotary_pos_emb:
            return None
        # Upstream prefers the deprecated argument over `dim`.
        return self.rel_pos_emb_config[0] if self.rel_pos_emb_config else self.dim

    @property
    def xpos_base(self) -> float | None:
        """The base of xpos' exponents, or None where xpos has no effect (off, or no rotary)."""
        if not self.use_xpos or self.rotary_dim is None:
            return None
        return self.window_size // 2 if self.xpos_scale_base is None else self.xpos_scale_base

    def score_scale(self, head_dim: int) -> float:
        """Return the factor of q for heads of width `head_dim`."""
        return head_dim**-0.5 if self.scale is None else self.scale
