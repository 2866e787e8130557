"""Rotary position embedding, applied once per token outside the attention node.

Upstream rotates every key again for every window that sees it, at its slot `c` among the `K` gathered
keys, and a query at slot `K - w + a`. Scores depend on the difference of the two angles only, which is
`(t - s) + f·w` for a query at `t` and a key at `s`: rotating a key once at its absolute position and a
query once at `t + f·w` gives the same scores. The offset `f·w` is upstream's own (a query takes
the positions of the last window it looks at) and trained weights depend on it.

    θ(m, c) = m · inv_freq_c,   x ↦ x·cos θ + rotate_half(x)·sin θ,   rotate_half(x₁, x₂) = (-x₂, x₁)

Source: `local_attention.rotary.SinusoidalEmbeddings` and `apply_rotary_pos_emb`, local-attention 1.11.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .fused_calls import rotate


class RotaryTable(nn.Module):
    """Cosines and signed sines of every position, for queries and for keys.

    Args:
        dim: head size, even.
        length: the longest sequence; its positions are `0 … length-1`.
        offset: how far queries are shifted, `f·w`.
        sequence_first: the tensors to rotate are `[B, N, H, D]`, else `[B, H, N, D]`.
        dynamic_length: the file's length is dynamic; shorter sequences take the first rows of the tables.
    """

    takes_file_dtype = True
    inv_freq: Tensor
    key_cosine: Tensor
    key_sine: Tensor
    query_cosine: Tensor
    query_sine: Tensor

    def __init__(
        self, dim: int, length: int, offset: int, *, sequence_first: bool, dynamic_length: bool = False
    ) -> None:
        super().__init__()
        self.length, self.offset = length, offset
        self.sequence_first, self.dynamic_length = sequence_first, dynamic_length
        self.register_buffer("inv_freq", torch.zeros(dim // 2))

    def prepare(self) -> None:
        """Compute the tables in fp64 from `inv_freq` as loaded: `[N, 1, 2, D/2]` or `[N, 2, D/2]`, fp32."""
        for name, offset in (("key", 0), ("query", self.offset)):
            position = torch.arange(self.length, dtype=torch.float64) + offset
            angle = position[:, None] * self.inv_freq.double()[None, :]
            cosine = torch.stack((angle.cos(), angle.cos()), dim=1)
            sine = torch.stack((-angle.sin(), angle.sin()), dim=1)  # with rotate_half's sign
            for part, table in (("cosine", cosine), ("sine", sine)):
                table = table.unsqueeze(1) if self.sequence_first else table
                self.register_buffer(f"{name}_{part}", table.float(), persistent=False)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query and key; their shapes are unchanged."""
        tables = [self.query_cosine, self.query_sine, self.key_cosine, self.key_sine]
        if self.dynamic_length:
            length = key.shape[1 if self.sequence_first else 2]
            tables = [table.narrow(0, 0, length) for table in tables]
        return rotate(query, *tables[:2]), rotate(key, *tables[2:])
