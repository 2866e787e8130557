"""`local_attention.LocalAttention` (and zeta's copy of it) with static shapes.

    o_t = Σ_s softmax_s( scale·⟨R_{t+fw} q_t, R_s k_s⟩ + bias[h, t mod w, slot] ) · v_s

over the keys `s` that `core.geometry` makes visible. shared_qk normalises k first and lowers a token's score with
itself; xpos adds a decay per channel, which the attention node applies. If the sequence is not a multiple of the
window, upstream pads it with zeros. Causal queries and queries with a mask never see them, but a non-causal query
without a mask does, with weight e^0. That is reproduced.

Source: `local_attention.LocalAttention.forward`, local-attention 1.11.2; `zeta.nn.attention.local_attention`
2.8.8 computes the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..parts.attention_op import windowed_attention_op
from ..parts.fused_calls import unit_norm
from ..parts.rotary import RotaryTable
from .arguments import LocalAttentionArgs


class LocalAttention(nn.Module):
    """Windowed attention over `q, k, v`.

    Args:
        args: upstream's arguments.
        length: sequence length `N`, or the longest if `dynamic_length`.
        head_dim: head size `D`.
        sequence_first: `q, k, v` are `[B, N, H, D]`, else `[B, H, N, D]` as upstream has them.
        dynamic_length: the file's length is dynamic, up to `length`.
    """

    def __init__(
        self,
        args: LocalAttentionArgs,
        length: int,
        head_dim: int,
        *,
        sequence_first: bool = False,
        dynamic_length: bool = False,
    ) -> None:
        super().__init__()
        self.geometry = args.geometry()
        self.sequence_first, self.dynamic_length = sequence_first, dynamic_length
        self.shared_qk = args.shared_qk
        self.scale = args.score_scale(head_dim)
        self.rel_pos: RotaryTable | None = None
        self.xpos_scale_base = 0.0
        if args.rotary_dim is not None:
            self.rel_pos = RotaryTable(
                args.rotary_dim,
                length,
                self.geometry.forward_reach,
                sequence_first=sequence_first,
                dynamic_length=dynamic_length,
            )
            self.xpos_scale_base = args.xpos_base or 0.0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, attn_bias: Tensor | None = None
    ) -> Tensor:
        """Compute attention, `[B, H, N, D]` or sequence first → the same; mask bool `[B, N]`, attn_bias `[H, w, K]`."""
        if self.shared_qk:
            k = unit_norm(k).to(k.dtype)
        if self.rel_pos is not None:
            q, k = self.rel_pos(q, k)
        axis = 1 if self.sequence_first else 2
        length = q.shape[axis]
        padding, mask = self._padding(length, q.shape[0], mask)
        if padding:
            after_sequence = (0, 0, 0, 0, 0, padding) if self.sequence_first else (0, 0, 0, padding)
            q, k, v = (F.pad(x, after_sequence) for x in (q, k, v))
        out = windowed_attention_op(
            q,
            k,
            v,
            self.geometry,
            self.scale,
            key_mask=mask,
            attn_bias=attn_bias,
            shared_qk=self.shared_qk,
            sequence_first=self.sequence_first,
            xpos_scale_base=self.xpos_scale_base,
        )
        return out.narrow(axis, 0, length) if padding else out

    def _padding(self, length: int, batch: int, mask: Tensor | None) -> tuple[int, Tensor | None]:
        """Return how many zeros to append to the sequence, and the key mask.

        For a dynamic length the number of zeros up to a whole window is not known at export. Then the largest possible
        number is appended, and a mask hides those that upstream would not have added.
        """
        window = self.geometry.window_size
        if self.geometry.causal or mask is not None:
            return 0, mask
        if not self.dynamic_length:
            return -length % window, None
        whole = (length + window - 1) // window * window
        kept = torch.arange(length + window - 1) < whole
        return window - 1, kept.unsqueeze(0).expand(batch, -1)
