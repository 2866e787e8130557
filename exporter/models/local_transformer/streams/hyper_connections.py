"""Hyper-connections: residual streams that every branch reads and writes with learned weights.

With `S` streams `r_s` of width `D` and `u = r/‖r‖·√D·(γ + 1)`:

    A = static_alpha + tanh(u @ dynamic_alpha_fn)·dynamic_alpha_scale      [S, 1+S]
    β = static_beta  + tanh(u @ dynamic_beta_fn)·dynamic_beta_scale        [S]
    m_t = Σ_s A[s, t]·r_s;   y = branch(m_0);   r'_s = β_s·y + m_{1+s}

Releases before 0.3.10 keep `r_s` in place of `m_{1+s}`: the same keys, but other results. γ, √D and the two functions
are one matrix here, computed once. Upstream folds the streams into the batch; here they stay an axis, `[B, N, S, D]`,
so that no stream is transposed. They are the widest tensors of the model, so reading and writing them is one fused node
each (`core.fused_node`). Before the first connection all streams are equal, and after the last only their sum is
needed: `stream_ends.py` has these two.

Source: `hyper_connections.HyperConnections`, hyper-connections 0.4.11; "Hyper-Connections", arXiv 2409.19606.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...parts.fused_calls import read_streams, write_streams


class HyperConnection(nn.Module):
    """One branch between residual streams, `[B, N, S, D]` → `[B, N, S, D]`.

    Args:
        branch: `[B, N, D]` → `[B, N, D]`.
        streams: number of residual streams `S` ≥ 2.
        dim: width `D`.
        mixes_residuals: whether the residual streams are mixed (releases from 0.3.10 on).
    """

    weight: Tensor
    gain: Tensor
    static: Tensor

    def __init__(self, branch: nn.Module, streams: int, dim: int, *, mixes_residuals: bool) -> None:
        super().__init__()
        self.branch = branch
        self.mixes_residuals = mixes_residuals
        self.norm = _Gain(dim)
        self.static_alpha = nn.Parameter(torch.zeros(streams, 1 + streams))
        self.dynamic_alpha_fn = nn.Parameter(torch.zeros(dim, 1 + streams))
        self.dynamic_alpha_scale = nn.Parameter(torch.zeros(()))
        self.static_beta = nn.Parameter(torch.ones(streams))
        self.dynamic_beta_fn = nn.Parameter(torch.zeros(dim))
        self.dynamic_beta_scale = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def prepare(self) -> None:
        """Fold the norm's gain into one matrix `[D, 2+S]`: a column per weight of A, the last one for β.

        The two scales are expanded to `[S, 2+S]`, the shape they multiply: broadcast for each stream of each token,
        they took onnxruntime three times as long.
        """
        gamma = self.norm.gamma.double()
        function = torch.cat((self.dynamic_alpha_fn, self.dynamic_beta_fn[:, None]), dim=1).double()
        weight = function * ((gamma + 1) * gamma.shape[0] ** 0.5)[:, None]
        streams = self.static_beta.shape[0]
        gain = torch.cat((self.dynamic_alpha_scale.expand(1 + streams), self.dynamic_beta_scale[None]))
        gain = gain.expand(streams, -1)
        static = torch.cat((self.static_alpha, self.static_beta[:, None]), dim=1)
        for name, value in (("weight", weight.float()), ("gain", gain), ("static", static)):
            self.register_buffer(name, value.clone(), persistent=False)

    def forward(self, streams: Tensor, *branch_inputs: Any) -> Tensor:
        """Read from the streams, run the branch and write back; streams stay fp32 whatever the branch's dtype."""
        read, mix, beta = read_streams(streams, self.weight, self.gain, self.static)
        output = self.branch(read, *branch_inputs).float()
        return write_streams(streams, mix if self.mixes_residuals else None, beta, output)


class _Gain(nn.Module):
    """Upstream's RMSNorm, reduced to its one parameter `γ`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(dim))


class Residual(nn.Module):
    """A plain residual connection, `x + branch(x)`, which is the case of one stream."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor, *branch_inputs: Any) -> Tensor:
        """Compute `x + branch(x)`, `[B, N, D]` → `[B, N, D]`."""
        written: Tensor = x + self.branch(x, *branch_inputs).float()
        return written
