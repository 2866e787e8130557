"""`local_attention.LocalTransformer` with static shapes.

    token_emb + pos_emb → S residual streams → depth × [LocalMHA, feed-forward] → sum of the streams
      → LayerNorm → Linear

`num_tokens = None` takes embeddings and gives embeddings. Feed-forward: LayerNorm, Linear, `x·gelu(gate)`,
Linear. The dynamic position bias is an MLP over `|w + i - j|`; with fixed weights it is a constant.

Source: `local_attention.transformer.LocalTransformer`, `FeedForward` and `DynamicPositionBias`,
local-attention 1.11.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..local_mha.module import LocalMHA
from ..parts.fused_calls import gated_gelu
from .arguments import LocalTransformerArgs
from .hyper_connections import FirstHyperConnection, HyperConnection, LastHyperConnection, Residual


class FeedForward(nn.Sequential):
    """`x, gate = W₁·LayerNorm(x);  W₂·(x·gelu(gate))`, `[…, dim]` → `[…, dim]`, with the exact (erf) gelu.

    Args:
        dim: width.
        inner: width between the two matrices.
    """

    def __init__(self, dim: int, inner: int) -> None:
        # Two places without weights (upstream's activation and dropout), which the keys count.
        super().__init__(
            nn.LayerNorm(dim),
            nn.Linear(dim, inner * 2, bias=False),
            nn.Identity(),
            nn.Identity(),
            nn.Linear(inner, dim, bias=False),
        )

    @torch.no_grad()
    def prepare(self) -> None:
        """Cut the first matrix in two: two products cost the same as one, and need no copy to split the result."""
        for name, half in zip(("value", "gate"), self[1].get_parameter("weight").chunk(2), strict=True):
            linear = nn.Linear(half.shape[1], half.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(half)  # a view: the weights stay in memory once
            self.add_module(name, linear)
        self[1] = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer; the norm is in fp32, the matrix products are in the matrices' own dtype."""
        norm, _, _, _, contract, value, gate = self.children()
        x = norm(x.float()).to(contract.weight.dtype)
        output: Tensor = contract(gated_gelu(value(x), gate(x)))
        return output


class DynamicPositionBias(nn.Module):
    """Additive bias `[H, w, 2w]` from an MLP over the distance of query and key."""

    takes_file_dtype = True
    bias: Tensor

    def __init__(self, dim: int, heads: int, window_size: int) -> None:
        super().__init__()
        self.window_size = window_size
        self.mlp = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, heads))

    @torch.no_grad()
    def prepare(self) -> None:
        """Evaluate the MLP once, `bias[h, i, j] = mlp(|w + i - j|)[h]`."""
        window = self.window_size
        by_distance = self.mlp(torch.arange(2 * window, dtype=torch.float32)[:, None])  # [2w, H]
        query, key = torch.arange(window) + window, torch.arange(2 * window)
        distance = (query[:, None] - key[None, :]).abs()
        self.register_buffer("bias", by_distance[distance].permute(2, 0, 1).contiguous(), persistent=False)

    def forward(self) -> Tensor:
        """Return the bias `[H, w, 2w]`."""
        return self.bias


class TransformerWeights(nn.Module):
    """What a `LocalTransformer` has before and after its layers, under upstream's names.

    Args:
        args: upstream's arguments.
    """

    def __init__(self, args: LocalTransformerArgs) -> None:
        super().__init__()
        self.streams = args.num_residual_streams
        self.has_embeddings = args.num_tokens is not None
        if args.num_tokens is not None and args.max_seq_len is not None:
            self.token_emb = nn.Embedding(args.num_tokens, args.dim)
            self.pos_emb = nn.Embedding(args.max_seq_len, args.dim)
            self.to_logits = nn.Sequential(nn.LayerNorm(args.dim), nn.Linear(args.dim, args.num_tokens, bias=False))
        self.dynamic_pos_bias = (
            DynamicPositionBias(args.dim // 2, args.heads, args.local_attn_window_size)
            if args.use_dynamic_pos_bias
            else None
        )


class LocalTransformer(TransformerWeights):
    """Tokens `[B, N]` int64 → logits `[B, N, num_tokens]`, or embeddings `[B, N, dim]` → the same.

    Args:
        args: upstream's arguments.
        length: sequence length `N`, or the longest if `dynamic_length`.
        mixes_residuals: which hyper-connections the weights were trained with.
        dynamic_length: the file's length is dynamic, up to `length`.
    """

    positions: Tensor

    def __init__(
        self, args: LocalTransformerArgs, length: int, *, mixes_residuals: bool = True, dynamic_length: bool = False
    ) -> None:
        super().__init__(args)
        self.length, self.dynamic_length = length, dynamic_length

        def connect(branch: nn.Module, sort: type[HyperConnection]) -> nn.Module:
            if self.streams == 1:
                return Residual(branch)
            return sort(branch, self.streams, args.dim, mixes_residuals=mixes_residuals)

        self.layers = nn.ModuleList()
        for layer in range(args.depth):
            before = FirstHyperConnection if layer == 0 else HyperConnection
            after = LastHyperConnection if layer == args.depth - 1 else HyperConnection
            attention = LocalMHA(args.mha_args(), length, dynamic_length=dynamic_length)
            feed_forward = FeedForward(args.dim, args.ff_inner)
            self.layers.append(nn.ModuleList((connect(attention, before), connect(feed_forward, after))))

    @torch.no_grad()
    def prepare(self) -> None:
        """Keep the position embeddings of this length as a constant in fp32."""
        if self.has_embeddings:
            self.register_buffer("positions", self.pos_emb.weight[: self.length].clone(), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the model; mask bool `[B, N]`, True = keep."""
        given = x.dtype
        if self.has_embeddings:
            positions = self.positions.narrow(0, 0, x.shape[1]) if self.dynamic_length else self.positions
            x = self.token_emb(x).float() + positions
        else:
            x = x.float()
        bias = self.dynamic_pos_bias() if self.dynamic_pos_bias is not None else None
        for layer in self.layers:
            attention, feed_forward = layer.children()
            x = feed_forward(attention(x, mask, bias))
        if not self.has_embeddings:
            return x.to(given)
        norm, project = self.to_logits
        # The extra axis keeps onnxruntime from fusing the last sum with the norm: its SkipLayerNormalization took seven
        # times as long as the two nodes on the CPU.
        logits: Tensor = project(norm(x.unsqueeze(1)).to(project.weight.dtype))
        return logits.squeeze(1)
