"""Residual streams around a branch that also returns its caches: read, run the branch, write.

The formula of `hyper_connections.py`, with the same weights and folded matrix, in two functions so that the branch
between them may return more than one tensor. For one token every node costs the same, however little it computes, so
there are few: tokens and sequences are rows of one matrix, and the norm and the write are one node each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .hyper_connections import HyperConnection
from .norms import unit_norm

# What `write` needs from `read`: residuals, and β of a hyper-connection.
Kept = tuple[Tensor, Tensor | None]


class StepResidual(nn.Module):
    """A plain residual connection, `[R, D]`, which is the case of one stream."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def read(self, x: Tensor) -> tuple[Tensor, Kept]:
        """Return the branch's input, and what `write` needs."""
        return x, (x, None)

    def write(self, kept: Kept, output: Tensor) -> Tensor:
        """Add the branch's output to the residual."""
        return kept[0] + output.float()


class StepHyperConnection(HyperConnection):
    """A branch `[R, D]` → `[R, D]` between the residual streams `[R, S, D]` of `R` tokens, or `[S, D]` of one.

    Gains are applied to results instead of weights, `g·((tanh u + static/g)ᵀ r)`, because there they are part of a
    matrix product. With a gain of 0 this is impossible; such a connection applies them to the weights.
    """

    offset: Tensor

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the folded matrix, and the static weights divided by their gains."""
        super().prepare()
        self.gains = (float(self.dynamic_alpha_scale), float(self.dynamic_beta_scale))
        if all(self.gains):
            self.register_buffer("offset", (self.static.double() / self.gain.double()).float(), persistent=False)

    def read(self, streams: Tensor) -> tuple[Tensor, Kept]:
        """Return the branch's input, and what `write` needs."""
        dynamic = torch.tanh(_unit(streams) @ self.weight)  # [R, S, 2+S], or [S, 2+S]
        weights = dynamic + self.offset if all(self.gains) else dynamic * self.gain + self.static
        alpha, beta = torch.split(weights, [weights.shape[-1] - 1, 1], dim=-1)
        if self.mixes_residuals:
            mixed = self._scaled(alpha.transpose(-1, -2) @ streams, 0)
            read, residuals = torch.split(mixed, [1, streams.shape[-2]], dim=-2)
        else:
            read, residuals = self._scaled(alpha[..., :1].transpose(-1, -2) @ streams, 0), streams
        return read if read.dim() == 2 else read.squeeze(1), (residuals, beta)

    def write(self, kept: Kept, output: Tensor) -> Tensor:
        """Compute the next streams, `residuals + β·output`."""
        residuals, beta = kept
        assert beta is not None
        if residuals.dim() == 3:
            return residuals + self._scaled(beta, 1) * output.float().unsqueeze(1)
        if all(self.gains):
            return torch.addmm(residuals, beta, output.float(), alpha=self.gains[1])
        return residuals + beta * output.float()

    def _scaled(self, x: Tensor, which: int) -> Tensor:
        return x * self.gains[which] if all(self.gains) else x


def _unit(x: Tensor) -> Tensor:
    """Compute `x / ‖x‖`, zeros for zeros, with one node where `unit_norm` has three."""
    if not torch.onnx.is_in_onnx_export():
        return unit_norm(x)
    unit: Tensor = torch.onnx.ops.symbolic("LpNormalization", [x], {"axis": -1, "p": 2}, dtype=x.dtype, shape=x.shape)
    return unit
