"""The first and the last hyper-connection of a model, where separate streams are not yet, or no longer, needed.

Before the first one all streams are the same `x`, and their products with the matrix too. With `τ_t = tanh(x̂·W_t)`
(`hyper_connections.py` has the formula)

    m_t = Σ_s A[s, t]·x = (Σ_s static_alpha[s, t] + S·dynamic_alpha_scale·τ_t)·x

After the last one only the sum of the streams is used:

    Σ_s r'_s = Σ_s (Σ_t A[s, 1+t])·r_s + (Σ_s β_s)·y

So the first need not read separate streams, and the last need not write them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...parts.fused_calls import begin_streams, end_streams, read_streams, stream_weights
from .hyper_connections import HyperConnection


class FirstHyperConnection(HyperConnection):
    """A branch that begins the streams, `[B, N, D]` → `[B, N, S, D]`."""

    @torch.no_grad()
    def prepare(self) -> None:
        """Fold the weights into a column each for `m_0`, for the `S` other `m` if they are mixed, and for the `S` β."""
        super().prepare()
        streams = self.static.shape[0]
        read = 1 + streams if self.mixes_residuals else 1
        columns = [*range(read), *[1 + streams] * streams]
        gain = self.gain[0, columns]
        gain[:read] *= streams
        static = torch.cat((self.static[:, :read].sum(dim=0), self.static[:, -1]))
        for name, value in (("weight", self.weight[:, columns]), ("gain", gain), ("static", static)):
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor, *branch_inputs: Any) -> Tensor:
        """Read from `x`, run the branch and write all streams, which are fp32 whatever the branch's dtype."""
        streams = self.static_beta.shape[0]
        weights = stream_weights(x, self.weight, self.gain, self.static)
        output = self.branch(weights[..., :1] * x, *branch_inputs).float()
        beta = weights[..., -streams:].unsqueeze(-1)
        if self.mixes_residuals:
            return begin_streams(x, weights[..., 1 : 1 + streams].unsqueeze(-1), beta, output)
        written: Tensor = x.unsqueeze(-2) + beta * output.unsqueeze(-2)
        return written


class LastHyperConnection(HyperConnection):
    """A branch that ends the streams, `[B, N, S, D]` → their sum `[B, N, D]`."""

    def forward(self, streams: Tensor, *branch_inputs: Any) -> Tensor:
        """Read from the streams, run the branch, and return the sum of the new streams."""
        read, mix, beta = read_streams(streams, self.weight, self.gain, self.static)
        output = self.branch(read, *branch_inputs).float()
        if self.mixes_residuals:
            return end_streams(streams, mix, beta, output)
        written: Tensor = streams.sum(dim=-2) + beta.sum(dim=-2) * output
        return written
