"""Hyper-connections: residual streams that every branch reads and writes with learned weights.

With `S` streams `r_s` of width `D` and `u = r/‖r‖·√D·(γ + 1)`:

    A = static_alpha + tanh(u @ dynamic_alpha_fn)·dynamic_alpha_scale      [S, 1+S]
    β = static_beta  + tanh(u @ dynamic_beta_fn)·dynamic_beta_scale        [S]
    m_t = Σ_s A[s, t]·r_s;   y = branch(m_0);   r'_s = β_s·y + m_{1+s}

Releases before 0.3.10 keep `r_s` in place of `m_{1+s}`: the same keys, but other results. γ, √D and the two functions
are one matrix here, computed once. Upstream folds the streams into the batch; here they stay an axis, `[B, N, S, D]`,
so that no stream is transposed. They are the widest tensors of the model, so reading and writing them is one fused node
each (`core.nodes.fused`).

Before the first connection all streams are the same `x`, and their products with the matrix too. With
`τ_t = tanh(x̂·W_t)`

    m_t = Σ_s A[s, t]·x = (Σ_s static_alpha[s, t] + S·dynamic_alpha_scale·τ_t)·x

After the last one only their sum is used:

    Σ_s r'_s = Σ_s (Σ_t A[s, 1+t])·r_s + (Σ_s β_s)·y

So the first need not read separate streams, and the last need not write them. In a step file the branch returns its
caches too: there reading and writing are two functions. One token has no axes but those of its streams, for which the
nodes' functions have fewer operators: every one costs the same there, however little it computes.

Source: `hyper_connections.HyperConnections`, hyper-connections 0.4.11; "Hyper-Connections", arXiv 2409.19606.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..parts.fused_calls import begin_streams, end_streams, read_streams, stream_weights, write_streams

# What `write` needs: the streams or the residual, and mix and β of a hyper-connection.
Kept = tuple[Tensor, Tensor | None, Tensor | None]


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


class StepHyperConnection(HyperConnection):
    """A branch `[R, D]` → `[R, D]` between the residual streams `[1, R, S, D]` of `R` tokens, or `[S, D]` of one."""

    def read(self, streams: Tensor) -> tuple[Tensor, Kept]:
        """Return the branch's input, and what `write` needs."""
        read, mix, beta = read_streams(streams, self.weight, self.gain, self.static)
        kept = streams, mix if self.mixes_residuals else None, beta
        return read if read.dim() == 2 else read.squeeze(0), kept

    def write(self, kept: Kept, output: Tensor) -> Tensor:
        """Compute the next streams."""
        streams, mix, beta = kept
        assert beta is not None
        output = output.float()
        return write_streams(streams, mix, beta, output if streams.dim() == 2 else output.unsqueeze(0))


class Residual(nn.Module):
    """A plain residual connection, `x + branch(x)`, which is the case of one stream."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor, *branch_inputs: Any) -> Tensor:
        """Compute `x + branch(x)`, `[B, N, D]` → `[B, N, D]`."""
        written: Tensor = x + self.branch(x, *branch_inputs).float()
        return written


class StepResidual(Residual):
    """The same step by step, `[R, D]` → `[R, D]`."""

    def read(self, x: Tensor) -> tuple[Tensor, Kept]:
        """Return the branch's input, and what `write` needs."""
        return x, (x, None, None)

    def write(self, kept: Kept, output: Tensor) -> Tensor:
        """Add the branch's output to the residual."""
        return kept[0] + output.float()
