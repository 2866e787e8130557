"""Causal `LocalTransformer` a few tokens at a time.

The formula of `exporter/models/local_transformer/module.py`. Tables that depend on the position alone (position
embeddings, rotary phases) are computed once and passed to every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..local_attention.step_module import Caches, StepAttention
from ..local_mha.step_module import StepMHA
from .arguments import LocalTransformerArgs
from .hyper_connections import StepHyperConnection, StepResidual
from .module import FeedForward, TransformerWeights

Connection = StepHyperConnection | StepResidual


class StepTransformer(TransformerWeights):
    """Tokens `[B, C]` int64 → logits `[B, C, num_tokens]`, or embeddings `[B, C, dim]` → the same.

    Args:
        args: upstream's arguments, of a causal model.
        chunk: tokens per call `C`.
        mixes_residuals: which hyper-connections the weights were trained with.
    """

    positions: Tensor

    def __init__(self, args: LocalTransformerArgs, chunk: int, *, mixes_residuals: bool = True) -> None:
        super().__init__(args)
        self.chunk = chunk

        def connect(branch: nn.Module) -> Connection:
            if self.streams == 1:
                return StepResidual(branch)
            return StepHyperConnection(branch, self.streams, args.dim, mixes_residuals=mixes_residuals)

        self.layers = nn.ModuleList(
            nn.ModuleList(
                (
                    connect(StepMHA(args.mha_args(), chunk, args.learned_positions)),
                    connect(FeedForward(args.dim, args.ff_inner)),
                )
            )
            for _ in range(args.depth)
        )

    @torch.no_grad()
    def prepare(self) -> None:
        """Keep the position embeddings in fp32, and find the layers that can share their tables."""
        if self.has_embeddings:
            self.register_buffer("positions", self.pos_emb.weight.float().clone(), persistent=False)
        attentions = self._attentions()
        frequencies = [None if x.rel_pos is None else x.rel_pos.inv_freq for x in attentions]
        self.view_of = [
            next(first for first, other in enumerate(frequencies) if _same(own, other)) for own in frequencies
        ]
        for attention, first in zip(attentions, self.view_of, strict=True):
            attention.rel_pos = attentions[first].rel_pos  # so that its tables are computed once

    def _attentions(self) -> list[StepAttention]:
        connections = (cast(Connection, cast(nn.ModuleList, layer)[0]) for layer in self.layers)
        return [cast(StepMHA, connection.branch).attn_fn for connection in connections]

    def forward(self, x: Tensor, position: Tensor, caches: Sequence[Caches]) -> tuple[Tensor, list[Caches]]:
        """Compute the outputs and the next caches, in order; position int64 `[1]`."""
        given, batch = x.dtype, x.shape[0]
        if self.has_embeddings:
            own = position if self.chunk == 1 else position + torch.arange(self.chunk)
            x = self.token_emb(x).float() + F.embedding(own, self.positions)
        rows = batch * self.chunk
        x = x.float().reshape(rows, -1)
        bias = self.dynamic_pos_bias() if self.dynamic_pos_bias is not None else None
        if self.streams > 1:
            x = x.expand(self.streams, -1) if rows == 1 else x[None, :, None].expand(-1, -1, self.streams, -1)
        attentions, following = self._attentions(), []
        views = {first: attentions[first].view(position, batch, bias) for first in set(self.view_of)}
        for layer, cache, view in zip(self.layers, caches, self.view_of, strict=True):
            attention, feed_forward = (cast(Connection, part) for part in cast(nn.ModuleList, layer))
            read, kept = attention.read(x)
            output, after = attention.branch(read, cache, views[view])
            following.append(after)
            read, kept_too = feed_forward.read(attention.write(kept, output))
            x = feed_forward.write(kept_too, feed_forward.branch(read))
        if self.streams > 1:
            x = x.sum(dim=-2, keepdim=rows == 1).reshape(rows, -1)
        if self.has_embeddings:
            norm, project = self.to_logits
            x = project(norm(x).to(project.weight.dtype))
        else:
            x = x.to(given)
        return x.reshape(batch, self.chunk, -1), following


def _same(own: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two layers have the same rotary frequencies, or both none."""
    if own is None or other is None:
        return own is other
    return torch.equal(own, other)
